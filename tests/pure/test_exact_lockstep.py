"""Refinement of replicas that share experts: one order for all, never slower than greedy's, and under the caps of each."""

from __future__ import annotations

import logging
import random
import re
import time
from dataclasses import replace
from itertools import chain

import pytest

from megatron_epp.cost import CPU, ModelShape, analytic_costs
from megatron_epp.plan import check, check_lockstep
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner.exact.lockstep import LockstepRefiner, refined_together
from megatron_epp.planner.exact.refine import Refined
from megatron_epp.planner.search.lockstep import plan_lockstep
from megatron_epp.planner.service.background import BackgroundPlanner

pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")

SHAPE = ModelShape(
    num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512, num_experts=8, experts_per_token=2
)
COSTS = analytic_costs(SHAPE, CPU, [4, 4])
LENGTHS = (3000, 900, 700, 310), (1500, 1400, 800, 60)
OPTIONS = Options(planner="milp", slices=2, split_weight=True, plan_limit_s=10)


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


@pytest.mark.parametrize("seed", range(3))
def test_no_greedy_plans_of_all_replicas_are_below_the_bound(seed: int):
    draw = random.Random(seed)
    asked = problems(*(tuple(draw.randrange(100, 3000) for _ in range(3)) for _ in range(3)))
    found = refined_together(asked, COSTS, replace(OPTIONS, plan_limit_s=5))
    assert isinstance(found, Refined)
    assert found.bound_us <= found.makespan_us <= found.start_us
    for slices in (1, 2):  # a chunk table of its own each, whose bound is its own
        own = replace(OPTIONS, slices=slices, plan_limit_s=5)
        one = refined_together(asked, COSTS, own)
        assert isinstance(one, Refined)
        assert one.bound_us <= plan_lockstep(asked, COSTS, replace(own, planner="greedy"))[0].predicted.makespan_us


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
