"""Plans of a caller's microbatches run each whole, in the best of three orders."""

from megatron_epp.plan import Segment, check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner.microbatches import plan_as_given, plan_microbatches
from tests.support.plan.planner_cases import pipeline

MICROBATCHES = ((16, 8), (32,), (8, 8), (400,))
PROBLEM = Problem((), (0, 1), (UNLIMITED_BYTES,) * 2)
COSTS = pipeline(2, 2)


def test_a_plan_runs_other_microbatches_that_are_no_larger_in_its_order() -> None:
    other = ((16, 8), (30,), (16,), (390, 10))
    planned = plan_microbatches(MICROBATCHES, PROBLEM, COSTS, Options())
    plan, order = planned.of(other)
    assert order == planned.order
    assert plan.ranks == planned.plan.ranks
    assert [fault for fault in check(plan) if "predicted" not in str(fault)] == []
    assert [tuple(plan.lengths[segment.sequence] for segment in chunk.segments) for chunk in plan.chunks] == [
        other[index] for index in order
    ]


def test_each_microbatch_is_a_chunk_of_whole_sequences_in_any_order() -> None:
    plan, order = plan_microbatches(MICROBATCHES, PROBLEM, COSTS, Options())
    assert check(plan) == []
    assert sorted(order) == [0, 1, 2, 3]
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
        plan, order = plan_microbatches(microbatches, PROBLEM, COSTS, options)
        assert order in (longest, longest[::-1], given)
        assert len(plan.chunks) == len(microbatches)


def test_equal_microbatches_run_in_the_order_given() -> None:
    microbatches = ((30, 20),) * 6
    assert plan_microbatches(microbatches, PROBLEM, COSTS, Options()).order == tuple(range(6))


def test_the_best_order_is_no_slower_than_the_given_one() -> None:
    given, best = (make(MICROBATCHES, PROBLEM, COSTS, Options()).plan for make in (plan_as_given, plan_microbatches))
    assert best.predicted.makespan_us <= given.predicted.makespan_us
