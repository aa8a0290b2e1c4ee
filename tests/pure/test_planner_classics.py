"""Greedy is never slower than orders of other papers with equal microbatches, placement and peak memory.

Every stage takes 1 for F, 1 for B and 1 for W of a microbatch; an order without W takes 2 for B. Messages take no time, what a
forward keeps stays until its W, and recompute saves nothing.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_epp.plan import Action, Chunk, Op, Segment
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, ListScheduling, Options, Problem, plan, tabulate
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.orders.patterns import BLOCKS, Block, Interleaved
from megatron_epp.planner.registry import PLANNERS
from scripts.bench.orders.orders import LAYERS, ORDERS, TIE, costs_of
from scripts.bench.orders.unit import Unit, fewest, unit_costs
from tests.support.seeds import some_by_default


@pytest.mark.parametrize("name", [name for name in ORDERS if not PLANNERS.entries()[ORDERS[name][0]].lacks])
@some_by_default(("ranks", "microbatches"), [(4, 8), (8, 32)], 1)
def test_greedy_is_no_slower_than_an_order_with_as_much_memory(name: str, ranks: int, microbatches: int):
    planner, count = ORDERS[name]
    entry = PLANNERS.entries()[planner]
    assert entry.fixed is not None
    layout = entry.fixed.layout(LAYERS, ranks, count)
    costs = costs_of(layout, 4096)
    options = Options(split_weight=entry.splits_weight, overlap_exchanges=entry.joins)
    free = Problem((4096,) * max(microbatches, fewest(name, ranks)), layout.placement.rank_of, (UNLIMITED_BYTES,) * ranks)
    made = plan(free, costs, replace(options, planner=planner))
    ours = plan(replace(free, cap_bytes=(max(made.predicted.peak_bytes),) * ranks), costs, options)
    assert ours.predicted.makespan_us <= made.predicted.makespan_us * (1 + TIE)


@pytest.mark.parametrize("name", ["interleaved", "hanayo"], ids=["looped", "v"])
def test_forwards_and_backwards_in_turn_wait_as_little_as_megatrons_interleaved_order(name: str):
    unit = Unit(name, 8, 32)
    orders = {
        rule: rule.order(unit.chunks, unit.tables, unit.problem) for rule in map(ListScheduling, (2.5, 2.5), (False, True))
    }
    waits = [unit.waits(replace(unit.of_paper(), order=order)) for order in orders.values()]
    assert waits[0] > waits[1] == 7 * 3 / 2


PATTERNS = (Interleaved(), Interleaved(elastic=False))
V_PATTERNS = tuple(Block(name, minimal) for name in BLOCKS for minimal in (False, True))


@pytest.mark.parametrize("microbatches", [10, 11])
def test_microbatches_whose_own_windows_are_a_deadlock_are_interleaved_with_one_warm_up(microbatches: int):
    unit = Unit("interleaved, 4", 4, microbatches)
    order = PATTERNS[0].order(unit.chunks, unit.tables, unit.problem)
    assert order == unit.of_paper().order
    assert order != ListScheduling(2, alternating=True).order(unit.chunks, unit.tables, unit.problem)


@pytest.mark.parametrize("seed", range(12))
def test_patterns_run_every_action_once_whatever_the_slices(seed: int):
    draw = random.Random(seed)
    ranks, counts = draw.randint(2, 6), sorted((draw.choice((1, 1, 2, 5, 9)) for _ in range(draw.randint(1, 20))), reverse=True)
    chunks = tuple(Chunk((Segment(q, 10 * k, 10 * k + 10),)) for q, count in enumerate(counts) for k in range(count))
    for kind, laps, rules in (("looped", 2, PATTERNS), ("looped", 3, PATTERNS), ("v", 2, V_PATTERNS)):
        placement = Placement(kind, ranks, laps)
        problem = Problem(tuple(10 * count for count in counts), placement.rank_of, (UNLIMITED_BYTES,) * ranks)
        tables = tabulate(chunks, problem, unit_costs(placement.num_stages))
        for rule in rules:
            order = rule.order(chunks, tables, problem)
            assert makespan_us(order, tables, [[0] * len(chunks)] * placement.num_stages) > 0
            every = sorted(action for row in order for action in row)
            stages, table = range(placement.num_stages), range(len(chunks))
            assert every == sorted(Action(op, stage, c) for op in (Op.F, Op.B) for stage in stages for c in table)
