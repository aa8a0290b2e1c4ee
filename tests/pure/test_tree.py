"""Ranks are divided into small groups whose first ranks are divided again, so that each is connected to few others."""

import pytest

from megatron_epp.plan.communicators import LARGEST_MESH, tree_of
from scripts.write_communicators import num_connections


@pytest.mark.parametrize("num_ranks", [1, 2, 63, 64])
def test_few_ranks_are_one_group(num_ranks):
    assert tree_of(num_ranks) == ((tuple(range(num_ranks)),),)
    assert num_connections(num_ranks, 0) == num_ranks - 1


@pytest.mark.parametrize(("num_ranks", "largest"), [(65, 64), (512, 64), (4096, 64), (5000, 64), (8, 4), (9, 2), (27, 3)])
def test_every_level_divides_the_first_ranks_of_the_one_below(num_ranks, largest):
    levels, members = tree_of(num_ranks, largest), tuple(range(num_ranks))
    for level in levels:
        assert tuple(rank for group in level for rank in group) == members
        sizes = [len(group) for group in level]
        assert max(sizes) <= largest
        assert max(sizes) - min(sizes) <= 1
        members = tuple(group[0] for group in level)
    assert members == (0,)


def test_a_rank_of_a_large_job_has_fewer_connections_than_two_full_groups_have():
    for num_ranks in (65, 512, 1024, 4096):
        most = max(num_connections(num_ranks, rank) for rank in range(num_ranks))
        assert most <= 2 * (LARGEST_MESH - 1)
    assert num_connections(512, 0) == 63 + 7
    assert num_connections(512, 1) == 63
