"""Process groups, made by every rank of a job at the same point and with its time limit, and their exchange of objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Options = Callable[[], Any]
"""Function that makes a backend's options, new ones for every group: torch writes the group's name and ranks into them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Makes process groups.

    Attributes:
        timeout: limit of a collective or message; None for torch's default, 10 minutes on NCCL and 30 on gloo.
        create: makes one, as `torch.distributed.new_group` does.
    """

    timeout: timedelta | None = None
    create: Callable[..., dist.ProcessGroup] = dist.new_group

    def of(self, mine: tuple[int, ...], backend: str | None = None, options: Options | None = None) -> dist.ProcessGroup:
        """Make the groups that the ranks name, and return this rank's. torch wants every rank to make all, in the same order.

        Args:
            mine: global ranks; a rank that names a group without itself gets what torch gives to outsiders.
            backend: None for the default one.
            options: options of the backend; None for its defaults.
        """
        named: list[tuple[int, ...] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(named, mine)
        found: dist.ProcessGroup | None = None
        for ranks in sorted({r for r in named if r is not None}):
            own = None if options is None else options()
            group = self.create(ranks=list(ranks), timeout=self.timeout, backend=backend, pg_options=own)
            found = group if ranks == mine else found
        assert found is not None  # `mine` is among the named
        return found


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
