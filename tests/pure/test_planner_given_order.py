"""Plans for a given order: recompute and copies that fit it, and whole microbatches as given or in the best order of three."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.plan import UNLIMITED_BYTES, Action, Chunk, InfeasibleError, Op, Plan, PlanError, Segment
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, Problem, WarmUp, elastic_1f1b, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.fit import held_bytes
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.given_order import in_given_order
from megatron_epp.planner.message_room import planned_with_room
from megatron_epp.planner.microbatches import plan_as_given, plan_microbatches
from megatron_epp.planner.order import Order
from tests.support.plan.planner_cases import GIB, pipeline, problem

Case = tuple[tuple[Chunk, ...], Problem]
LAYERS = 4


def cases() -> Iterator[Case]:
    draw = random.Random(3)
    for ranks, chunks_per_rank in ((1, 1), (2, 1), (4, 1), (3, 1), (2, 2), (4, 2), (2, 3)):
        for count in (1, 5, 2 * ranks, 12):
            lengths = tuple(draw.choice((draw.randint(1, 400), draw.randint(400, 9000))) for _ in range(count))
            problem = Problem(lengths, Placement("looped", ranks, chunks_per_rank).rank_of, (UNLIMITED_BYTES,) * ranks)
            yield tuple(Chunk((Segment(at, 0, length),)) for at, length in enumerate(lengths)), problem


CASES = tuple(cases())


def planned(chunks: tuple[Chunk, ...], problem: Problem, recompute: str | int = "auto", plain: bool = False) -> Plan:
    costs, options = pipeline(problem.num_stages, LAYERS), Options(recompute=recompute)  # type: ignore[arg-type]

    def make(asked: Problem) -> Plan:
        return build_plan(asked, costs, options, in_given_order(chunks, asked, costs, options, plain))

    return planned_with_room(problem, costs, options, make)


def run_by(plan: Plan, stage: int, op: Op) -> list[int]:
    actions = [action for row in plan.ranks for step in row for action in step.actions]
    return [action.chunk for action in actions if action.stage == stage and action.op is op]


def check_order(plan: Plan, num_chunks: int) -> None:
    given = list(range(num_chunks))
    for stage in range(plan.num_stages):
        assert run_by(plan, stage, Op.F) == given
        assert run_by(plan, stage, Op.B) == ([] if plan.forward_only else given)
        assert len({str(one) for one in plan.recompute[stage]}) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].placement} {len(case[0])}")
def test_every_stage_keeps_the_order_and_recomputes_alike_for_all_chunks(case: Case) -> None:
    chunks, problem = case
    free = planned(chunks, problem)
    check_order(free, len(chunks))
    assert not any(one.num_layers for row in free.recompute for one in row)
    least = peaks_with_all_recomputed(chunks, problem)
    for part in (0.7, 0.3):
        caps = tuple(int(low + part * (high - low)) for low, high in zip(least, free.predicted.peak_bytes, strict=True))
        capped = planned(chunks, replace(problem, cap_bytes=caps))
        check_order(capped, len(chunks))
        assert all(peak <= cap for peak, cap in zip(capped.predicted.peak_bytes, caps, strict=True))


def peaks_with_all_recomputed(chunks: tuple[Chunk, ...], problem: Problem) -> Sequence[int]:
    return planned(chunks, problem, LAYERS, plain=True).predicted.peak_bytes


def test_stages_recompute_only_as_much_as_their_own_ranks_cap_asks_for() -> None:
    chunks, problem = next(case for case in CASES if len(case[1].placement) == 4 and len(case[0]) == 12)
    free = planned(chunks, problem, plain=True).predicted.peak_bytes
    caps = ((free[0] + peaks_with_all_recomputed(chunks, problem)[0]) // 2, *(2 * peak for peak in free[1:]))
    layers = [row[0].num_layers for row in planned(chunks, replace(problem, cap_bytes=caps), plain=True).recompute]
    assert 0 < layers[0] <= LAYERS
    assert layers[1:] == [0, 0, 0]
    assert planned(chunks, problem, layers[0] - 1, plain=True).predicted.peak_bytes[0] > caps[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].placement} {len(case[0])}")
def test_an_evaluation_takes_chunks_of_a_rank_in_turns_of_as_many_microbatches_as_there_are_ranks(case: Case) -> None:
    chunks, problem = case
    plan = planned(chunks, replace(problem, forward_only=True))
    check_order(plan, len(chunks))
    ranks, laps = problem.num_ranks, problem.num_stages // problem.num_ranks
    if len(chunks) % ranks:
        return  # Megatron's interleaved schedule refuses such a number
    turns = [(lap, at + c) for at in range(0, len(chunks), ranks) for lap in range(laps) for c in range(ranks)]
    for row in plan.ranks:
        actions = [action for step in row for action in step.actions]
        assert [(action.stage // ranks, action.chunk) for action in actions] == turns


MICROBATCHES = ((16, 8), (32,), (8, 8), (400,))
TWO_RANKS = Problem((), (0, 1), (UNLIMITED_BYTES,) * 2)
TWO_STAGES = pipeline(2, 2)


def test_a_plan_runs_other_microbatches_that_are_no_larger_in_its_order() -> None:
    other = ((16, 8), (30,), (16,), (390, 10))
    planned = plan_microbatches(MICROBATCHES, TWO_RANKS, TWO_STAGES, Options())
    plan, order = planned.of(other)
    assert (order, plan.ranks) == (planned.order, planned.plan.ranks)
    assert [fault for fault in check(plan) if "predicted" not in str(fault)] == []
    assert [tuple(plan.lengths[segment.sequence] for segment in chunk.segments) for chunk in plan.chunks] == [
        other[index] for index in order
    ]


def test_each_microbatch_is_a_chunk_of_whole_sequences_in_any_order() -> None:
    plan, order = plan_microbatches(MICROBATCHES, TWO_RANKS, TWO_STAGES, Options())
    assert (check(plan), sorted(order)) == ([], [0, 1, 2, 3])
    assert {index: plan.chunks[c].segments for c, index in enumerate(order)} == {
        0: (Segment(0, 0, 16), Segment(1, 0, 8)),
        1: (Segment(2, 0, 32),),
        2: (Segment(3, 0, 8), Segment(4, 0, 8)),
        3: (Segment(5, 0, 400),),
    }


def test_microbatches_run_in_one_of_three_orders_with_nothing_cut_or_joined() -> None:
    microbatches = ((30, 4), (9,), (200,), (12, 12), (65,))
    longest, given = (2, 4, 0, 3, 1), (0, 1, 2, 3, 4)
    for options in (Options(), Options(slices=4), Options(chunk_tokens=16), Options(offload=True)):
        plan, order = plan_microbatches(microbatches, TWO_RANKS, TWO_STAGES, options)
        assert order in (longest, longest[::-1], given)
        assert len(plan.chunks) == len(microbatches)


def test_equal_microbatches_run_in_the_order_given() -> None:
    assert plan_microbatches(((30, 20),) * 6, TWO_RANKS, TWO_STAGES, Options()).order == tuple(range(6))


def test_the_best_order_is_no_slower_than_the_given_one() -> None:
    given, best = (make(MICROBATCHES, TWO_RANKS, TWO_STAGES, Options()).plan for make in (plan_as_given, plan_microbatches))
    assert best.predicted.makespan_us <= given.predicted.makespan_us


BATCH_LENGTHS = (20_000, 9000, 700, 16_000, 60, 5000)
COSTS = pipeline(3, 4)
BATCH = problem(BATCH_LENGTHS, 3)


def cut(asked: Problem, chunks: int = 12) -> tuple[Chunk, ...]:
    chunker = Slicer.of(asked, COSTS, None)
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


CHUNKS = cut(BATCH)
ZERO_BUBBLE = with_weights(elastic_1f1b(CHUNKS, 3, False), [3])


def capped(share: float, order: Order) -> Problem:
    """A cap between the peaks of an order with all recomputed and with nothing."""
    tables = tabulate(CHUNKS, BATCH, COSTS)
    least, most = (max(int(row.max()) for row in held_bytes(order, tables, [[layers] * len(CHUNKS)] * 3)) for layers in (4, 0))
    return replace(BATCH, cap_bytes=(int(least + share * (most - least)),) * 3)


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
        assert (made.order, check(build_plan(asked, COSTS, options, made))) == (order, [])
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


@pytest.mark.parametrize(
    ("order", "words"),
    [(ZERO_BUBBLE[:2], "order has 2 rows for 3 ranks"), ((ZERO_BUBBLE[0][::-1], *ZERO_BUBBLE[1:]), "deadlocks")],
)
def test_a_mistake_in_the_order_is_reported(order: Order, words: str):
    """`test_planner_order.py` has the others."""
    with pytest.raises(PlanError, match=words):
        fitted(order, CHUNKS, BATCH, COSTS)
