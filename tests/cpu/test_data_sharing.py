"""One rank of a replica plans, all run its plans: order, errors, and that only one does the work."""

import pytest

from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.sharing_runs import collect, disagree, expected, fail_at, made_here, take_in_turns

NUM_RANKS = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(NUM_RANKS, tmp_path_factory.mktemp("ranks")) as job:
        yield job


def test_every_rank_gets_every_plan_in_the_order_of_its_batches(ranks):
    """Training and evaluation take theirs in turns, and no rank waits for another but at the exchange."""
    training, evaluation = expected(6, seed=1), expected(6, seed=2)
    assert ranks.run(take_in_turns, 6) == [[training, evaluation]] * NUM_RANKS


def test_only_the_first_rank_plans(ranks):
    first, *others = ranks.run(made_here, 5)
    assert first >= 5
    assert others == [0] * (NUM_RANKS - 1)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("infeasible", ("InfeasibleError", "needs 12 GB")),
        ("bug", ("EppError", "the next batch cannot be planned: ZeroDivisionError: a bug")),
    ],
)
def test_what_goes_wrong_in_planning_is_raised_by_all_ranks_at_that_batch(ranks, number, kind, error):
    before = [lengths for lengths, _ in expected(number - 1)]
    assert ranks.run(fail_at, number, kind) == [(before, [error, error])] * NUM_RANKS


def test_a_rank_that_samples_other_documents_says_so(ranks):
    errors = ranks.run(disagree)
    assert errors[0] is None
    assert all("the plan is for sequences of" in error and ", seed, " in error for (error,) in errors[1:])


def test_every_rank_learns_what_each_has(ranks):
    assert ranks.run(collect) == [[{"of": rank} for rank in range(NUM_RANKS)]] * NUM_RANKS
