"""All ranks of a replica have the same microbatches and the same plan, or all end with the same error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_epp.mcore.microbatches.planning import Agreed, plan_as_given, plan_microbatches
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
    for outcome in ranks.outcomes(shapes, [SHAPES, other], ("", ""), (0, 0), (4, 5)):
        assert outcome == (
            f"refused: microbatches differ between replicas that share experts, which run one plan: {said}. Give them as many "
            "microbatches of equal lengths in the same order (sort and balance, or pad), keep experts within a replica "
            "(EP x ETP at most TP x CP), or use Megatron's own schedule"
        )


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


def test_the_best_order_is_no_slower_than_the_given_one() -> None:
    given, best = (make(SHAPES, PROBLEM, COSTS, Options()).plan for make in (plan_as_given, plan_microbatches))
    assert best.predicted.makespan_us <= given.predicted.makespan_us
