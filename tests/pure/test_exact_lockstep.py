"""Refinement of replicas that share experts: one order for all, never slower than greedy's, and under the caps of each."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from dataclasses import replace
from itertools import chain

import pytest

from megatron_epp.contrib.exact.lockstep import LockstepRefiner, refined_together
from megatron_epp.contrib.exact.oracle import TOLERANCE
from megatron_epp.contrib.exact.refine import Refined
from megatron_epp.cost import CPU, ModelShape, analytic_costs
from megatron_epp.plan import PlanError, check, check_lockstep
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner.search.lockstep import found, plan_lockstep, written
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.service.background import BackgroundPlanner

pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")

SHAPE = ModelShape(
    num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512, num_experts=8, experts_per_token=2
)
COSTS = analytic_costs(SHAPE, CPU, [4, 4])
LENGTHS = (3000, 900, 700, 310), (1500, 1400, 800, 60)
OPTIONS = Options(planner="milp", slices=2, split_weight=True, plan_limit_s=10)
SEEDS = range(4)


def problems(*lengths: tuple[int, ...], cap_bytes: int = UNLIMITED_BYTES, **more: bool) -> tuple[Problem, ...]:
    return tuple(Problem(lengths=own, placement=(0, 1), cap_bytes=(cap_bytes,) * 2, **more) for own in lengths)


@pytest.mark.parametrize("share", [None, 0.8], ids=["without caps", "under caps"])
def test_refined_plans_are_sound_in_step_and_no_slower(share: float | None):
    steady = replace(OPTIONS, planner="greedy")
    peaks = [max(one.predicted.peak_bytes) for one in plan_lockstep(problems(*LENGTHS), COSTS, steady)]
    asked = problems(*LENGTHS, cap_bytes=UNLIMITED_BYTES if share is None else int(share * max(peaks)))
    before, refiner = plan_lockstep(asked, COSTS, steady), LockstepRefiner(COSTS, OPTIONS)
    assert [one.ranks for one in refiner.plan(asked)] == [one.ranks for one in before]
    assert refiner.queue.worker._connection.poll(60)
    shuffled = problems(*(own[::-1] for own in LENGTHS), cap_bytes=asked[0].cap_bytes[0])
    after = refiner.plan(shuffled)
    refiner.close()
    assert [one.lengths for one in after] == [one.lengths for one in shuffled]
    assert check_lockstep(after) == []
    for one, own in zip(after, shuffled, strict=True):
        assert check(one) == []
        assert one.predicted.makespan_us == after[0].predicted.makespan_us < before[0].predicted.makespan_us
        assert max(one.predicted.peak_bytes) <= own.cap_bytes[0]


def climbed_us(replicas: Replicas, draw: random.Random) -> float:
    """Return the least makespan that random swaps of neighbours find from greedy's order on, without the solver."""
    best = found(replicas)
    rows = [list(row) for row in best.made[0].order]

    def time_us() -> float:
        order = tuple(map(tuple, rows))
        try:
            return written(replicas, [replace(one, order=order) for one in best.made], best.tables)[0].predicted.makespan_us
        except PlanError:
            return math.inf

    now_us = time_us()
    for _ in range(300):
        row = draw.choice(rows)
        at = draw.randrange(len(row) - 1)
        row[at : at + 2] = row[at : at + 2][::-1]
        if (moved_us := time_us()) <= now_us:
            now_us = moved_us
        else:
            row[at : at + 2] = row[at : at + 2][::-1]
    return now_us


@pytest.mark.parametrize("seed", SEEDS)
def test_no_order_that_swaps_find_is_below_the_bound(seed: int):
    draw = random.Random(seed)
    asked = problems(*(tuple(draw.randrange(100, 3000) for _ in range(4)) for _ in range(2)))
    answer = refined_together(asked, COSTS, OPTIONS)
    assert isinstance(answer, Refined)
    found_us = climbed_us(Replicas(asked, COSTS, OPTIONS), draw)
    assert answer.bound_us <= found_us * (1 + TOLERANCE)
    assert found_us < answer.start_us


def test_replicas_that_offload_stay_greedy_and_a_line_says_why(caplog: pytest.LogCaptureFixture):
    costs, steady = replace(COSTS, host_latency_us=1.0), Options(offload=True, slices=2)
    peak = max(max(one.predicted.peak_bytes) for one in plan_lockstep(problems(*LENGTHS), costs, steady))
    asked = problems(*LENGTHS, cap_bytes=int(0.8 * peak))
    assert any(any(map(any, one.copies)) or one.kv_offload for one in plan_lockstep(asked, costs, steady))
    refiner = LockstepRefiner(costs, steady)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            refiner.plan(asked)
    assert not refiner.queue.waiting
    refiner.close()
    (said,) = caplog.messages
    assert said.endswith("it offloads nothing where replicas share experts")


def test_the_planner_of_a_training_refines_replicas_that_share_experts(caplog: pytest.LogCaptureFixture):
    planner = BackgroundPlanner(COSTS, replace(OPTIONS, plan_limit_s=1), lockstep_groups=((0, 1),))
    (batch,) = problems(tuple(chain(*LENGTHS)))
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            planner.plan(batch)
            if caplog.messages:
                break
            time.sleep(0.2)
    planner.close()
    assert re.fullmatch(r"refined a batch of 8 sequences: .* % less than greedy's, gap [\d.]+ %", caplog.messages[0])
