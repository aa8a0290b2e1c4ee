"""The oracle on equal microbatches with unit costs, whose optimum is a formula: F, B and W take one unit each on a rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.contrib.exact.oracle import Proven, oracle
from megatron_epp.cost import LinearTime, PipelineCosts
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.check import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, for_table
from megatron_epp.planner.assemble import build_plan
from scripts.bench.orders.unit import TOKENS, Unit
from tests.support.plan.stages import stage_of

pytest.importorskip("ortools", reason="the oracle needs OR-tools: pip install 'megatron-epp[milp]'")

WHOLE, SPLIT = Options(), Options(split_weight=True)


def best(unit: Unit, microbatches: float, options: Options) -> Proven:
    """Solve under a cap of so many microbatches, and compare the plan with what the solver says of it."""
    capped = replace(unit.problem, cap_bytes=(int(microbatches * TOKENS),) * unit.problem.num_ranks)
    start = for_table(unit.chunks, capped, unit.costs, options)
    found = oracle(unit.chunks, capped, unit.costs, options, start=start, time_limit_s=60)
    assert found.optimal
    assert found.decisions is not None
    made = build_plan(capped, unit.costs, options, found.decisions)
    assert check(made) == []
    assert made.predicted.makespan_us == found.makespan_us <= start.makespan_us(capped, unit.costs)
    assert found.bound_us == pytest.approx(found.makespan_us)
    return found


def waits(unit: Unit, found: Proven) -> float:
    """Idle time of a rank, in units."""
    return found.makespan_us / TOKENS - 3 * unit.microbatches


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 4), (4, 5)])
def test_whole_backwards_wait_as_1f1b_whatever_the_memory(p: int, m: int):
    """The bubble of 1F1B is (p - 1)(F + B), and with the memory of p microbatches or with more no order has less."""
    unit = Unit("1f1b-sliced", p, m)
    assert [waits(unit, best(unit, cap, WHOLE)) for cap in (p, m + 1)] == [3 * (p - 1)] * 2


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 4), (4, 6)])
def test_split_weight_gradients_wait_as_zb_h1_with_the_memory_of_1f1b(p: int, m: int):
    """The bubble of ZB-H1 is (p - 1)(F + B - W); a rank's W fill all but the way of the first forward."""
    unit = Unit("zb-h1", p, m)
    assert waits(unit, best(unit, p, SPLIT)) == p - 1 == unit.waits(unit.of_paper())


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v", "interleaved", "hanayo"])
def test_no_order_of_several_stages_per_rank_is_faster_with_its_memory(name: str):
    unit = Unit(name, 2, 4)
    theirs = unit.of_paper()
    found = best(unit, unit.peak_bytes(theirs) / TOKENS, replace(SPLIT, split_weight=unit.splits_weight))
    assert waits(unit, found) <= unit.waits(theirs)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 3)])
def test_memory_for_one_microbatch_runs_one_after_the_other(p: int, m: int):
    """Rank 0 keeps a microbatch from its forward to its weight gradient, 2 p + 1 units later."""
    unit = Unit("zb-h1", p, m)
    assert best(unit, 1, SPLIT).makespan_us / TOKENS == m * (2 * p + 1)


def johnson(jobs: list[tuple[int, int]]) -> int:
    """Least makespan of two machines in a flow shop (Johnson, 1954)."""
    first = sorted((job for job in jobs if job[0] < job[1]), key=lambda job: job[0])
    last = sorted((job for job in jobs if job[0] >= job[1]), key=lambda job: -job[1])
    ends = 0, 0
    for on_one, on_two in (*first, *last):
        ends = ends[0] + on_one, max(ends[0] + on_one, ends[1]) + on_two
    return ends[1]


@pytest.mark.parametrize("lengths", [(12, 3, 15, 8), (2, 9, 30, 11, 10)])
def test_forwards_alone_are_a_flow_shop_of_two_machines(lengths: tuple[int, ...]):
    """The first stage takes a unit of time per token, the second ten for any chunk; backwards take none."""
    none = LinearTime(0.0, 0.0)
    sizes = {f"{name}_per_token": 0.0 for name in ("layer_bytes", "recomputed_layer_bytes", "kv_bytes")}
    stages = tuple(
        stage_of(num_layers=1, forward=line, backward=none, **sizes) for line in (LinearTime(0.0, 1.0), LinearTime(10.0, 0.0))
    )
    costs = PipelineCosts("flow shop", stages, hidden_bytes_per_token=0.0)
    asked = Problem(lengths, (0, 1), (UNLIMITED_BYTES,) * 2)
    chunks = tuple(Chunk((Segment(q, 0, length),)) for q, length in enumerate(lengths))
    found = oracle(chunks, asked, costs, Options())
    assert found.optimal
    assert found.makespan_us == johnson([(length, 10) for length in lengths])
