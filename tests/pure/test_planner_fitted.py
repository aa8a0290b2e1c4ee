"""Recompute and copies for an order that a builder gives: under the cap wherever that is possible, with W counted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_epp.plan import UNLIMITED_BYTES, Action, Chunk, InfeasibleError, Op, PlanError, check
from megatron_epp.planner import Chunker, ListScheduling, Options, WarmUp, elastic_1f1b, fitted, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.fit import held_bytes
from megatron_epp.planner.order import Order
from megatron_epp.planner.problem import Problem
from tests.support.plan.planner_cases import GIB, pipeline, problem

LENGTHS = (20_000, 9000, 700, 16_000, 60, 5000)
COSTS = pipeline(3, 4)
BATCH = problem(LENGTHS, 3)


def cut(asked: Problem, chunks: int = 12) -> tuple[Chunk, ...]:
    chunker = Chunker.of(asked, COSTS, None)
    return chunker.table(chunker.grain(chunks=chunks))


def with_weights(order: Order, waiting: Sequence[int]) -> Order:
    """Each weight gradient behind as many further backwards of its rank as `waiting` says, in turn."""
    return tuple(tuple(_delayed(row, waiting)) for row in order)


def _delayed(row: Sequence[Action], waiting: Sequence[int]) -> Iterator[Action]:
    left: list[Action] = []
    count = 0
    for action in row:
        yield action
        if action.op is Op.B:
            left.append(Action(Op.W, action.stage, action.chunk))
            if len(left) > waiting[count % len(waiting)]:
                yield left.pop(0)
            count += 1
    yield from left


def peaks(order: Order, chunks: tuple[Chunk, ...], layers: RecomputeSteps, modes: tuple[str, ...]) -> list[int]:
    tables = tabulate(chunks, BATCH, COSTS, modes)
    return [int(row.max()) for row in held_bytes(order, tables, layers)]


CHUNKS = cut(BATCH)
ZERO_BUBBLE = with_weights(elastic_1f1b(CHUNKS, 3, False), [3])


def capped(share: float, order: Order = ZERO_BUBBLE, modes: tuple[str, ...] = ("full",)) -> Problem:
    """A cap between the peaks of an order with all recomputed and with nothing."""
    none = [[0] * len(CHUNKS)] * 3
    most = [[4] * len(CHUNKS)] * 3
    least, all_kept = (max(peaks(order, CHUNKS, layers, modes)) for layers in (most, none))
    return replace(BATCH, cap_bytes=(int(least + share * (all_kept - least)),) * 3)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_waits_it_fits_as_soon_as_all_recomputed_fits_and_the_error_names_that_cap(seed: int):
    draw = random.Random(seed)
    rule = WarmUp(lead=draw.choice([1, 1.5, 2]), minimal=draw.random() < 0.5)
    chunks = cut(BATCH, draw.choice([4, 9, 20]))
    modes = draw.choice([("full",), COSTS.recompute_modes])
    options = Options(recompute_modes="full" if modes == ("full",) else "all")
    tables = tabulate(chunks, BATCH, COSTS, modes)
    order = with_weights(rule.order(chunks, tables, BATCH), [draw.randrange(6) for _ in range(5)])
    with pytest.raises(InfeasibleError) as refused:
        fitted(order, chunks, replace(BATCH, cap_bytes=(1,) * 3), COSTS, options)
    cap = refused.value.least_cap_bytes
    for more in (0, GIB, 8 * GIB):
        asked = replace(BATCH, cap_bytes=(cap + more,) * 3)
        made = fitted(order, chunks, asked, COSTS, options)
        assert made.order == order
        assert check(build_plan(asked, COSTS, options, made)) == []
    with pytest.raises(InfeasibleError):
        fitted(order, chunks, replace(BATCH, cap_bytes=(cap - 1,) * 3), COSTS, options)


def test_of_whole_backwards_it_recomputes_what_the_planner_does():
    made = plan(capped(0.5, elastic_1f1b(CHUNKS, 3, False)), COSTS, Options(slices=3))
    order = tuple(made.actions(rank) for rank in range(3))
    asked = replace(BATCH, cap_bytes=made.cap_bytes)
    again = build_plan(asked, COSTS, Options(), fitted(order, made.chunks, asked, COSTS))
    assert again.predicted.makespan_us <= made.predicted.makespan_us * 1.05
    assert check(again) == []


def test_copies_are_used_where_they_are_faster_than_recompute():
    order = with_weights(elastic_1f1b(CHUNKS, 3, False), [1])
    asked, options = capped(0.6, order), Options(offload=True)
    alone, made = fitted(order, CHUNKS, asked, COSTS), fitted(order, CHUNKS, asked, COSTS, options)
    assert any(made.copies)
    spans = [build_plan(asked, COSTS, options, one).predicted.makespan_us for one in (alone, made)]
    assert spans[1] < spans[0]


def test_several_stages_on_a_rank_and_evaluations_are_fitted_too():
    costs = pipeline(4, 2)
    looped = Problem(LENGTHS, (0, 1, 0, 1), (UNLIMITED_BYTES,) * 2)
    order = with_weights(ListScheduling(2).order(CHUNKS, tabulate(CHUNKS, looped, costs), looped), [2])
    with pytest.raises(InfeasibleError) as refused:
        fitted(order, CHUNKS, replace(looped, cap_bytes=(1, 1)), costs)
    looped = replace(looped, cap_bytes=(refused.value.least_cap_bytes + GIB,) * 2)
    assert check(build_plan(looped, costs, Options(), fitted(order, CHUNKS, looped, costs))) == []
    asked = replace(BATCH, forward_only=True)
    made = fitted(elastic_1f1b(CHUNKS, 3, True), CHUNKS, asked, COSTS, Options(offload=True))
    assert check(build_plan(asked, COSTS, Options(), made)) == []


@pytest.mark.parametrize(
    ("order", "words"),
    [(ZERO_BUBBLE[:2], "order has 2 rows for 3 ranks"), ((ZERO_BUBBLE[0][::-1], *ZERO_BUBBLE[1:]), "deadlocks")],
)
def test_a_mistake_in_the_order_is_reported(order: Order, words: str):
    """`test_planner_mistakes.py` has the others."""
    with pytest.raises(PlanError, match=words):
        fitted(order, CHUNKS, BATCH, COSTS)
