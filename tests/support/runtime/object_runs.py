"""Programs of the ranks in the tests of object groups."""

import time

import psutil
import torch.distributed as dist

from megatron_epp.runtime.links.objects import Groups, ObjectGroup, gathered_by


def exchanges(rank, links, named, largest):
    """Return what this rank gets from an object group of the ranks that each names, in meshes of at most `largest`."""
    group = ObjectGroup.create(named[rank], Groups(largest_mesh=largest))
    if not group.levels:
        return None
    for _ in range(20):  # exchanges follow each other without waiting for all members
        last = group.from_first([f"of {rank}", time.monotonic_ns()])
    return (
        last[0],
        group.from_each({"of": rank, "long": "x" * rank * 1000}),
        group.is_first,
        [_ranks(one) for one in group.levels],
    )


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


def _ranks(group):
    return dist.get_process_group_ranks(group)


def _sockets():
    return sum(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections("tcp"))
