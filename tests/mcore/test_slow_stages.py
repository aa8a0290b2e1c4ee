"""A rank that becomes slow after costs were learnt is named once, with its host, stage and what it costs, in both loops."""

import logging
import re
import shlex
import socket
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_epp.features.slow_stages import stage_watch
from megatron_epp.features.slow_stages.stage_watch import ITERATIONS, SLOWER, SlowStages, StageWatch, slowed_us
from megatron_epp.plan import Action, Op, Plan
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.mcore.forked import CHANGED, job, launch, succeeded
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.plan.small_plans import one_f_one_b

NAMED = r"rank 1 on (\S+) takes ([\d.]+) of the time of its costs for stage 1 "
NAMED += r"\(([\d.]+) ms an iteration by the plan, ([\d.]+) ms without\)"


def check_named(output: str) -> None:
    (named,) = re.findall(NAMED, output)
    host, ratio, slow_ms, quick_ms = named
    assert host == socket.gethostname()
    assert float(ratio) > SLOWER
    assert float(slow_ms) > float(quick_ms)
    assert re.search(rf"WARNING:.*slower than costs for {ITERATIONS} iterations: ", output)


@pytest.mark.slow  # the other loop with the same watch
def test_a_slow_rank_of_a_frameworks_own_loop_is_named() -> None:
    check_named(succeeded(job(2, "frameworks:slow")).output)


def test_a_slow_rank_of_a_training_on_documents_is_named(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(200, 64), vocab_size=127))
    flags = shlex.split("--pipeline-model-parallel-size 2 --global-batch-size 4 --seq-length 64 --max-position-embeddings 64 ")
    flags += shlex.split(f"--epp-costs learn --epp-lookahead 1 --train-iters {6 + 2 * ITERATIONS}")
    check_named(succeeded(launch(2, CHANGED, "slow", *PLANNED, *flags, "--data-path", data)).output)


PLAN = one_f_one_b()


def took(plan: Plan, rank: int, factor: float) -> Iterator[tuple[Action, float]]:
    """Measured times of a rank whose actions take `factor` of their planned time; waits for messages do not count."""
    yield plan.ranks[rank][0].action._replace(op=Op.RECV_F), 1e9
    for step in plan.ranks[rank]:
        yield step.action, factor * step.time_us


class FirstOfTwo:
    """Group whose other rank is never slow; `found` are the items of this one that the other has received."""

    is_first = True

    def __init__(self) -> None:
        self.found: list[object] = []

    def from_each(self, mine: object) -> list[object]:
        self.found.append(mine)
        return [mine, (1, "b", {})]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FirstOfTwo:
    monkeypatch.setattr(stage_watch, "dist", Namespace(get_rank=lambda: 0))
    return FirstOfTwo()


def run(group: FirstOfTwo, factors: list[float]) -> None:
    watch = StageWatch(0, group)  # type: ignore[arg-type]
    for factor in factors:
        watch.after(PLAN, Namespace(took_us=partial(took, PLAN, 0, factor)), dict)  # type: ignore[arg-type]
    watch.complete()


def test_ranks_meet_once_in_some_iterations(group: FirstOfTwo) -> None:
    run(group, [2.0] * (3 * ITERATIONS - 1))
    assert len(group.found) == 2


def test_a_stage_is_named_again_only_after_it_was_quick(group: FirstOfTwo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    slow, quick = [2.0] * ITERATIONS, [1.0] * ITERATIONS
    run(group, [*slow * 4, *quick * 2, *slow * 2])
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2
    assert all("takes 2.00 of the time of its costs for stage 0" in line for line in named)


SLOW = 2 * SLOWER


def watched(factors: list[float]) -> SlowStages:
    stages = SlowStages()
    for factor in factors:
        stages.add(PLAN, 1, took(PLAN, 1, factor))
    return stages


def test_a_stage_that_is_slow_for_long_is_found_with_its_ratio() -> None:
    assert watched([SLOW] * (ITERATIONS - 1)).slow == {}
    assert watched([1.0, *[SLOW] * ITERATIONS]).slow == {1: pytest.approx(SLOW)}
    assert watched([9.0] * ITERATIONS + [SLOW] * ITERATIONS).slow == {1: pytest.approx(SLOW)}


@pytest.mark.parametrize("factor", [0.5, 1.0, 0.99 * SLOWER])
def test_one_iteration_at_its_costs_begins_the_count_again(factor: float) -> None:
    assert watched([SLOW] * (ITERATIONS - 1) + [factor] + [SLOW] * (ITERATIONS - 1)).slow == {}
    assert watched([SLOW] * ITERATIONS + [factor]).slow == {}


def test_passes_of_vocabulary_shards_are_of_ranks_and_no_stage_is_named_for_them() -> None:
    """The loss of chunks, whose time is assumed, has the number of the first stage on the last rank."""
    shape = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=5000)
    costs = analytic_profile(shape, CPU).costs([2, 2], vocabulary_shares=(0.5, 0.5))
    made, stages = plan(Problem((40, 30, 20), (0, 1), (UNLIMITED_BYTES,) * 2), costs, Options()), SlowStages()
    slower = [(action, (9.0 if action.op in (Op.S, Op.N, Op.T) else 1.0) * time) for action, time in took(made, 1, 1.0)]
    for _ in range(ITERATIONS):
        stages.add(made, 1, slower)
    assert {step.action.stage for step in made.ranks[1] if step.action.op is Op.N} == {0}
    assert stages.slow == {}


def test_a_slow_stage_costs_what_a_simulation_says() -> None:
    assert slowed_us(PLAN, {}) == simulate(PLAN).makespan_us
    assert slowed_us(PLAN, {0: 1.0, 1: SLOW}) > slowed_us(PLAN, {1: 1.5}) > slowed_us(PLAN, {})
    assert slowed_us(PLAN, dict.fromkeys(range(PLAN.num_stages), 1e6)) > 1e5 * slowed_us(PLAN, {})
