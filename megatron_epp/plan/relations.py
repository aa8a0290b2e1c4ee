"""Dependencies between actions: what the table of operations says, resolved for a placement and a chunk table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Borrowed, Chunk, slice_neighbours
from megatron_epp.plan.columns import Integers
from megatron_epp.plan.operations import At, Need, Of, needs_of, operation

Needs = Callable[[Action], list[Action]]


class Resolved(NamedTuple):
    """A relation between the actions of one operation and site and the actions of another."""

    op: Op
    site: int
    need: Need


def resolve(op: Op, site: int, placement: Sequence[int]) -> Iterator[Resolved]:
    """Yield the relations of an operation at one of its sites, given the rank of every stage."""
    last = len(operation(op).sites(placement)) - 1
    for need in needs_of(op):
        if need.only is At.LAST and site != last:
            continue
        count = len(operation(need.op).sites(placement))
        if need.site is At.EVERY:
            yield from (Resolved(need.op, other, need) for other in range(count))
            continue
        other = count - 1 if isinstance(need.site, At) else site + need.site
        if 0 <= other < count:
            yield Resolved(need.op, other, need)


class ChunkLinks:
    """Chunks that a dependency can concern: neighbouring slices, and chunks whose loss is computed together."""

    def __init__(
        self, chunks: Sequence[Chunk], loss_groups: Sequence[Sequence[int]] = (), borrowed: Sequence[Borrowed] = ()
    ) -> None:
        neighbours = slice_neighbours(chunks, borrowed)
        self._previous, self._following = neighbours.previous, neighbours.following
        self._groups = {chunk: tuple(group) for group in loss_groups for chunk in group}

    def of(self, which: Of, chunk: int) -> Sequence[int]:
        if which is Of.SAME:
            return (chunk,)
        if which is Of.GROUP:
            return [other for other in self._groups.get(chunk, ()) if other != chunk]
        return (self._previous if which is Of.PREVIOUS else self._following)[chunk]

    def of_all(self, which: Of, chunks: Integers) -> tuple[Integers, Integers]:
        """List the chunks that a relation of many chunks concerns: positions in `chunks`, ascending, and for each one chunk."""
        if which is Of.SAME:
            return np.arange(len(chunks)), chunks
        concerned = [self.of(which, chunk) for chunk in range(len(self._previous))]
        counts, others = np.array(list(map(len, concerned))), np.array([*chain.from_iterable(concerned), -1])
        starts, repeats = np.cumsum(counts) - counts, counts[chunks]
        nth = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return np.repeat(np.arange(len(chunks)), repeats), others[np.repeat(starts[chunks], repeats) + nth]


def deps(
    chunks: Sequence[Chunk],
    num_stages: int,
    optional: Collection[Action] = (),
    placement: Sequence[int] = (),
    loss_groups: Sequence[Sequence[int]] = (),
    borrowed: Sequence[Borrowed] = (),
) -> Needs:
    """Build the function from an action to the actions that must have ended before it starts.

    Where a transfer is between the two (`Need.carries`), it must have arrived as well. `optional` are the plan's actions for
    which others wait only if it has them, such as `R` and `L` before a backward; `placement` is of use for operations whose
    sites are not stages.
    """
    links, present = ChunkLinks(chunks, loss_groups, borrowed), frozenset(optional)
    where = tuple(placement or range(num_stages))
    relations = lru_cache(maxsize=None)(lambda op, site: tuple(resolve(op, site, where)))

    def needs(action: Action) -> list[Action]:
        return [
            needed
            for op, site, need in relations(action.op, action.stage)
            for chunk in links.of(need.chunk, action.chunk)
            if (needed := Action(op, site, chunk)) in present or not need.if_present
        ]

    return needs
