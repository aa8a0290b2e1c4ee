"""Exchange of objects, which pickle, between ranks on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from megatron_epp.plan.communicators import LARGEST_MESH, tree_of
from megatron_epp.plan.errors import EppError, Names

GroupOptions = Callable[[], Any]
"""Function that makes a backend's options, new ones for every group: torch writes the group's name and ranks into them."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Factory of process groups."""

    # Limit of a collective or message; None for torch's default, 10 minutes on NCCL and 30 on gloo
    timeout: timedelta | None = None
    create: Callable[..., dist.ProcessGroup] = dist.new_group
    largest_mesh: int = LARGEST_MESH  # most members of a group of an `ObjectGroup`

    def of(
        self, members: tuple[int, ...], backend: str | None = None, options: GroupOptions | None = None
    ) -> dist.ProcessGroup:
        """Make the groups that the ranks name, and return this rank's. torch wants every rank to make all, in the same order.

        A rank that names a group of global ranks without itself gets what torch gives to outsiders.
        """
        own_group: dist.ProcessGroup | None = None
        for ranks in sorted(set(from_each_of_job(members))):  # sorted: every rank makes all groups in the same order
            own = None if options is None else options()
            group = self.create(ranks=list(ranks), timeout=self.timeout, backend=backend, pg_options=own)
            own_group = group if ranks == members else own_group
        assert own_group is not None  # `members` is among the named
        return own_group


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """Ranks that exchange objects, over gloo. Only one thread of a rank may use it. `ranks` are global and ascending.

    A group of gloo connects every two of its ranks, so many ranks are joined by a tree of groups, the lowest level first.
    """

    ranks: tuple[int, ...]
    levels: tuple[dist.ProcessGroup, ...]

    @staticmethod
    def create(ranks: Sequence[int], groups: Groups) -> ObjectGroup:
        """Make the group that each rank names, perhaps without itself. All ranks call this together, with as many `ranks`."""
        ranks, own, levels = tuple(sorted(ranks)), dist.get_rank(), list[dist.ProcessGroup]()
        for level in tree_of(len(ranks), groups.largest_mesh):
            named = [tuple(ranks[position] for position in block) for block in level]
            mine = next((block for block in named if own in block), None)
            group = groups.of(named[0] if mine is None else mine, backend="gloo")
            levels += [] if mine is None else [group]
        return ObjectGroup(ranks, tuple(levels))

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == self.ranks[0]

    def from_first(self, items: list[Any]) -> list[Any]:
        """Return the items of the first member on every member; other members' items are ignored. A collective call."""
        shared = [items]
        for group in reversed(self.levels):  # from the root of the tree down: a member has the items before it passes them on
            dist.broadcast_object_list(shared, src=_first_of(group), group=group)
        return shared[0]

    def from_each[T](self, item: T) -> list[T]:
        """Return the items of all members, in their order. A collective call, like `from_first`."""
        items = [item]
        for group in self.levels:  # up the tree; blocks are consecutive, so the items stay in the order of ranks
            items = [member_item for part in gathered_by([_first_of(group)], items, group) or [] for member_item in part]
        return self.from_first(items)


def _first_of(group: dist.ProcessGroup) -> int:
    return dist.get_process_group_ranks(group)[0]


def from_each_of_job[T](item: T) -> list[T]:
    """Return the items of all ranks of the job, in rank order. A collective call of the default process group."""
    everyone: list[T] = [item] * dist.get_world_size()
    dist.all_gather_object(everyone, item)
    return everyone


class AgreedError(EppError):
    """Error of one or several ranks, which all ranks of the job raise."""


def raise_for(problems: Sequence[str]) -> None:
    """Raise `AgreedError` if some rank has a problem; `problems` are those of all ranks, empty where there is none."""
    if of_ranks := {rank: problem for rank, problem in enumerate(problems) if problem}:
        same = len(of_ranks) == len(problems) and len(set(of_ranks.values())) == 1
        raise AgreedError(problems[0] if same else "; ".join(f"rank {rank}: {text}" for rank, text in of_ranks.items()))


def agreed[T](make: Callable[[], T], names: Names) -> T:
    """Return what a function makes here. Raises `AgreedError` if it fails on any rank. A collective call of the job."""
    result, problem = None, ""
    try:
        result = make()
    except EppError as error:
        problem = error.text(names)
    raise_for(from_each_of_job(problem))
    return cast(T, result)


def made_by_first[T](make: Callable[[], T], group: ObjectGroup | None = None) -> T:
    """Return what a function makes on the first rank, or raise its `EppError`, on all ranks. A collective call."""
    outcome: list[T | EppError | None] = [None]
    if (dist.get_rank() == 0) if group is None else group.is_first:
        try:
            outcome = [make()]
        except EppError as error:
            outcome = [error]
        except Exception as error:  # the others wait for an answer, and may not be able to unpickle this one
            failure = EppError(f"the first rank {'of the job ' * (group is None)}failed ({type(error).__name__}: {error})")
            failure.__cause__ = error  # stays on this rank
            outcome = [failure]
    if group is None:
        dist.broadcast_object_list(outcome, src=0)
    else:
        outcome = group.from_first(outcome)
    (result,) = outcome
    if isinstance(result, EppError):
        raise result
    return cast(T, result)


def gathered_by[T](readers: Iterable[int], item: T, group: dist.ProcessGroup) -> list[T] | None:
    """Return the items of a CPU group's ranks, in order, on global ranks `readers`, else None. A collective call."""
    items: list[T] | None = None
    for reader in [rank for rank in dict.fromkeys(readers) if rank in dist.get_process_group_ranks(group)]:
        gathered = [item] * dist.get_world_size(group) if dist.get_rank() == reader else None
        dist.gather_object(item, gathered, dst=reader, group=group)
        items = items or gathered
    return items
