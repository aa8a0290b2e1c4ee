"""Many ranks exchange objects over a tree of small groups: all get the same, and few connections are open."""

import time

import psutil
import pytest
import torch.distributed as dist

from megatron_epp.runtime.links.objects import Groups, ObjectGroup, gathered_by
from scripts.write_communicators import num_connections
from tests.support.runtime.rank_processes import ranks_fixture


def exchanges(rank, links, named, largest):
    """Return what this rank gets from an object group of the ranks that each names, in meshes of at most `largest`."""
    group = ObjectGroup.create(named[rank], Groups(largest_mesh=largest))
    if not group.levels:
        return None
    for _ in range(20):  # exchanges follow each other without waiting for all members
        last = group.from_first([f"of {rank}", time.monotonic_ns()])
    levels = [dist.get_process_group_ranks(one) for one in group.levels]
    return last[0], group.from_each({"of": rank, "long": "x" * rank * 1000}), group.is_first, levels


def new_connections(rank, links, largest):
    """Number of sockets to other ranks that an object group of all ranks opens."""
    everyone = range(dist.get_world_size())
    dist.barrier()
    before = _sockets()
    group = ObjectGroup.create(everyone, Groups(largest_mesh=largest))
    group.from_each(rank)
    return _sockets() - before


def read_by(rank, links, readers):
    """Items of all ranks on those that read them."""
    return gathered_by(readers, 10 * rank, links.figures)


def _sockets():
    return sum(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections("tcp"))


SIZE = 8


ranks = ranks_fixture(SIZE)


@pytest.mark.parametrize("largest", [2, 3, 4, SIZE])
def test_every_member_gets_the_items_of_the_first_and_of_each_in_order(ranks, largest):
    found = ranks.run(exchanges, [range(SIZE)] * SIZE, largest)
    everyone = [{"of": rank, "long": "x" * rank * 1000} for rank in range(SIZE)]
    assert [own[:3] for own in found] == [("of 0", everyone, rank == 0) for rank in range(SIZE)]
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
