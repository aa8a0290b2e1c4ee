"""Many ranks exchange objects over a tree of small groups: all get the same, and few connections are open."""

import pytest

from scripts.write_communicators import num_connections
from tests.support.runtime.object_runs import exchanges, new_connections, read_by
from tests.support.runtime.rank_processes import Ranks

SIZE = 8


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(SIZE, tmp_path_factory.mktemp("ranks")) as job:
        yield job


@pytest.mark.parametrize("largest", [2, 3, 4, SIZE])
def test_every_member_gets_the_items_of_the_first_and_of_each_in_order(ranks, largest):
    found = ranks.run(exchanges, [range(SIZE)] * SIZE, largest)
    everyone = [{"of": rank, "long": "x" * rank * 1000} for rank in range(SIZE)]
    assert [(first, each, is_first) for first, each, is_first, _ in found] == [
        ("of 0", everyone, rank == 0) for rank in range(SIZE)
    ]
    assert all(len(group) <= largest for *_, levels in found for group in levels)


def test_several_groups_are_made_together_and_ranks_may_be_in_none(ranks):
    even, odd = (0, 2, 4), (1, 3, 5)
    found = ranks.run(exchanges, [even, odd, even, odd, even, odd, even, odd], 2)
    assert found[6:] == [None, None]
    for named in (even, odd):
        for rank in named:
            first, each, is_first, _ = found[rank]
            assert (first, [one["of"] for one in each], is_first) == (f"of {named[0]}", list(named), rank == named[0])


@pytest.mark.parametrize("largest", [2, 4, SIZE])
def test_a_rank_is_connected_to_as_many_others_as_the_formula_says(ranks, largest):
    assert ranks.run(new_connections, largest) == [num_connections(SIZE, rank, largest) for rank in range(SIZE)]


def test_figures_reach_those_who_read_them_and_no_others(ranks):
    items = [10 * rank for rank in range(SIZE)]
    assert ranks.run(read_by, [3, 0, 3, SIZE]) == [items if rank in (0, 3) else None for rank in range(SIZE)]
