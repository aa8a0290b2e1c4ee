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
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, ListScheduling, Options, Problem, for_table, tabulate
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.memory.recompute import held_bytes, peaks_of
from megatron_epp.planner.search.order_rules import PATTERNS, V_PATTERNS
from scripts.bench.orders.builders import BUILDERS
from scripts.bench.orders.unit import unit_costs

WORKED = {
    "1F1B": (21, 8),
    "ZB-H1": (7, 8),
    "interleaved, 2": (10.5, 11.5),
    "interleaved, 4": (5.25, 9.75),
    "V-Min": (13.5, 4),
    "V-Half": (13, 5),
    "V-ZB": (6.5, 8),
    "DualPipeV": (3.5, 8.5),
}
"""Time that 8 ranks wait and microbatches that one keeps, of 32. Papers: ``(p - 1) * 3`` and p for 1F1B, the same time over the
stages per rank when interleaved, ``(p - 1)`` for ZB-H1; a third, half and all of p kept by the V blocks, rounded up.
"""
TOKENS = 100


class Unit:
    """Equal microbatches with unit costs, at the placement of an order."""

    def __init__(self, name: str, ranks: int, microbatches: int) -> None:
        self.builder, self.microbatches = BUILDERS[name], microbatches
        placement = self.builder.placement(ranks)
        self.chunks = tuple(Chunk((Segment(q, 0, TOKENS),)) for q in range(microbatches))
        self.costs = unit_costs(placement.num_stages)
        self.problem = Problem((TOKENS,) * microbatches, placement.rank_of, (UNLIMITED_BYTES,) * ranks)
        self.tables = tabulate(self.chunks, self.problem, self.costs)

    def of_paper(self) -> Decisions:
        stages = self.problem.num_stages
        return Decisions(
            self.chunks, self.builder.order(self.chunks, self.problem.num_ranks), [[0] * self.microbatches] * stages
        )

    def greedy(self, cap: int) -> Decisions:
        problem = Problem(self.problem.lengths, self.problem.placement, (cap,) * self.problem.num_ranks)
        return for_table(self.chunks, problem, self.costs, Options(split_weight=self.builder.splits))

    def makespan_us(self, made: Decisions) -> float:
        return makespan_us(made.order, self.tables, made.recompute_steps)

    def peak_bytes(self, made: Decisions) -> int:
        return max(peaks_of(held_bytes(made.order, self.tables, made.recompute_steps)))


@pytest.mark.parametrize("name", WORKED)
def test_orders_wait_and_keep_what_their_papers_say(name: str):
    unit = Unit(name, 8, 32)
    made, scale = unit.of_paper(), TOKENS * unit.builder.num_chunks
    assert (unit.makespan_us(made) / scale - 3 * 32, unit.peak_bytes(made) / scale) == WORKED[name]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(4, 8), (5, 15), (8, 32), pytest.param(6, 24, marks=pytest.mark.slow), pytest.param(8, 64, marks=pytest.mark.slow)],
)
def test_greedy_is_no_slower_than_an_order_with_as_much_memory(name: str, ranks: int, microbatches: int):
    unit = Unit(name, ranks, microbatches)
    made = unit.of_paper()
    cap = unit.peak_bytes(made)
    ours = unit.greedy(cap)
    assert unit.peak_bytes(ours) <= cap
    assert unit.makespan_us(ours) <= unit.makespan_us(made) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["interleaved, 2", "Hanayo"], ids=["looped", "v"])
def test_forwards_and_backwards_in_turn_wait_as_little_as_megatrons_interleaved_order(name: str):
    unit = Unit(name, 8, 32)
    orders = {
        rule: rule.order(unit.chunks, unit.tables, unit.problem) for rule in map(ListScheduling, (2.5, 2.5), (False, True))
    }
    waits = [unit.makespan_us(replace(unit.of_paper(), order=order)) / TOKENS / 2 - 3 * 32 for order in orders.values()]
    assert waits[0] > waits[1] == WORKED["interleaved, 2"][0]


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
