"""All ranks of a replica have the same microbatches and the same plan, or all end with the same error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.mcore.microbatches.planning import Agreed, _largest, _pairs, plan_as_given, plan_microbatches
from megatron_epp.mcore.microbatches.source import Microbatch
from megatron_epp.plan import Segment, check
from megatron_epp.planner import Options
from tests.support.runtime.agreement_runs import COSTS, PROBLEM, SHAPES, plans, shapes
from tests.support.runtime.rank_processes import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as both:
        yield both


def test_a_rank_without_data_learns_the_shapes(ranks: Ranks) -> None:
    assert ranks.run(shapes, [None, SHAPES], ("", ""), (0, 70)) == [Agreed(SHAPES, (0, 70))] * 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (SHAPES[:-1], "rank 0 has 4, rank 1 has 3"),
        ((*SHAPES[:-1], Microbatch((7,))), "microbatch 3 has 400 tokens in 1 sequences on rank 0 and 7 in 1 on rank 1"),
    ],
)
def test_different_microbatches_end_every_rank_with_the_numbers(ranks: Ranks, other: object, said: str) -> None:
    for outcome in ranks.outcomes(shapes, [SHAPES, other]):
        assert outcome == f"refused: microbatches differ between ranks of a replica: {said}"


def test_replicas_that_share_experts_need_as_many_microbatches(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(shapes, [SHAPES, SHAPES[:-1]], ("", ""), (0, 0), (4, 5)):
        assert outcome == (
            "refused: replicas that share experts run the same actions, and have other numbers of microbatches: rank 0 has 4, "
            "rank 1 has 3. Give them as many; keep experts within a replica (EP x ETP at most TP x CP); or use Megatron's own "
            "schedule"
        )


def test_replicas_that_share_experts_plan_the_largest_microbatches_and_each_runs_its_own(ranks: Ranks) -> None:
    other = (Microbatch((30,)), Microbatch((20, 10)), Microbatch((8, 8)), Microbatch((401,)))
    first, second = ranks.run(shapes, [SHAPES, other], ("", ""), (0, 70), (4, 5))
    assert (first.here, second.here) == (SHAPES, other)
    assert first.shapes == second.shapes
    assert first.num_bytes == second.num_bytes
    for own in (SHAPES, other):
        for largest, one in zip(first.shapes, own, strict=True):
            assert sum(largest.lengths) >= sum(one.lengths)
            assert _pairs(largest.lengths) >= _pairs(one.lengths)
    planned = plan_microbatches(first.shapes, PROBLEM, COSTS, Options())
    for own in (SHAPES, other):
        plan, order = planned.of(own)
        assert order == planned.order
        assert plan.ranks == planned.plan.ranks
        assert [fault for fault in check(plan) if "predicted" not in str(fault)] == []
        ours = [tuple(plan.lengths[segment.sequence] for segment in chunk.segments) for chunk in plan.chunks]
        assert ours == [own[index].lengths for index in order]


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_largest_shape_has_the_most_tokens_and_pairs_and_hardly_more(replicas: list[list[int]]) -> None:
    found = _largest(tuple(Microbatch(tuple(lengths)) for lengths in replicas))
    assert sum(found.lengths) == max(map(sum, replicas))
    most = max(map(_pairs, replicas))
    assert _pairs(found.lengths) >= most
    assert found.lengths in map(tuple, replicas) or len(found.lengths) <= 2


def test_an_error_of_one_rank_ends_every_rank(ranks: Ranks) -> None:
    said = "refused: rank 1: the data iterator ended after 1 of 4 microbatches"
    assert ranks.outcomes(shapes, [SHAPES, None], ("", said.removeprefix("refused: rank 1: "))) == [said] * 2


def test_without_data_on_any_rank_there_is_a_reason(ranks: Ranks) -> None:
    assert all("no rank of this pipeline has a data iterator" in said for said in ranks.outcomes(shapes, [None, None]))


def test_equal_inputs_give_equal_plans(ranks: Ranks) -> None:
    first, second = ranks.run(plans, ["best", "best"])
    assert first == second


def test_where_plans_differ_all_use_that_of_the_first_rank(ranks: Ranks) -> None:
    first, second = ranks.run(plans, ["given", "best"])
    assert first == second
    assert first[1] == (0, 1, 2, 3)


def test_a_rank_that_cannot_plan_ends_every_rank(ranks: Ranks) -> None:
    assert ranks.outcomes(plans, ["best", "fails"]) == ["refused: no plan"] * 2
    assert ranks.outcomes(plans, ["breaks", "best"]) == ["refused: ZeroDivisionError: a bug"] * 2


def test_each_microbatch_is_a_chunk_of_whole_sequences_in_any_order() -> None:
    plan, order = plan_microbatches(SHAPES, PROBLEM, COSTS, Options())
    assert check(plan) == []
    assert sorted(order) == [0, 1, 2, 3]
    assert {index: plan.chunks[c].segments for c, index in enumerate(order)} == {
        0: (Segment(0, 0, 16), Segment(1, 0, 8)),
        1: (Segment(2, 0, 32),),
        2: (Segment(3, 0, 8), Segment(4, 0, 8)),
        3: (Segment(5, 0, 400),),
    }


def test_microbatches_run_in_one_of_three_orders_with_nothing_cut_or_joined() -> None:
    shapes = tuple(Microbatch(lengths) for lengths in ((30, 4), (9,), (200,), (12, 12), (65,)))
    longest, given = (2, 4, 0, 3, 1), (0, 1, 2, 3, 4)
    for options in (Options(), Options(slices=4), Options(chunk_tokens=16), Options(offload=True)):
        plan, order = plan_microbatches(shapes, PROBLEM, COSTS, options)
        assert order in (longest, longest[::-1], given)
        assert len(plan.chunks) == len(shapes)


def test_equal_microbatches_run_in_the_order_given() -> None:
    shapes = (Microbatch((30, 20)),) * 6
    assert plan_microbatches(shapes, PROBLEM, COSTS, Options()).order == tuple(range(6))


def test_the_best_order_is_no_slower_than_the_given_one() -> None:
    given, best = (make(SHAPES, PROBLEM, COSTS, Options()).plan for make in (plan_as_given, plan_microbatches))
    assert best.predicted.makespan_us <= given.predicted.makespan_us
