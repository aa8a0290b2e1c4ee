"""Collectives over Python objects: broadcast from the first rank of a group, and gather from every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def from_first(items: list[Any], group: dist.ProcessGroup) -> list[Any]:
    """Return the items of the group's first rank, on every rank.

    A collective call: every rank of the group must call it at the same point, in the same thread as its other collectives.

    Args:
        items: anything that pickles, on the first rank; ignored on the others.
        group: a CPU group.
    """
    shared = [items]
    dist.broadcast_object_list(shared, src=dist.get_process_group_ranks(group)[0], group=group)
    return shared[0]


def from_each[T](item: T, group: dist.ProcessGroup) -> list[T]:
    """Return the items of all ranks of the group, one each, in rank order. A collective call, like `from_first`."""
    everyone: list[T] = [item] * dist.get_world_size(group)
    dist.all_gather_object(everyone, item, group=group)
    return everyone
