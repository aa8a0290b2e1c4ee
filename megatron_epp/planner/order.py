"""Orders of actions, and what all of them are made from: groups of chunks, and the order of backwards.

Chunk tables are numbered in forward order: the slices of a sequence stand together, ascending. Sequences with one loss should
too: in every order, the backwards of a group follow all its forwards on the stage with the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from megatron_epp.features import batch_target
from megatron_epp.plan import Action, Chunk, Op, Segment
from megatron_epp.plan.problem import Problem, connected

Order = Sequence[Sequence[Action]]
"""The compute actions of every rank, in order: tuples, or numbers that stand for them (`kernels.codes.CodedOrder`)."""

Groups = Sequence[Sequence[int]]
"""Chunks of a table, ascending in groups, in the order of their backwards: the last chunk of each group first."""

CopyOrder = tuple[tuple[tuple[Action, Action | None], ...], ...]
"""Offloads and loads of every rank in order, each with the compute action it waits for besides its own forward or offload."""


def slice_groups(chunks: Sequence[Chunk], loss_groups: Sequence[int] = ()) -> list[range]:
    """Cut a table in forward order into runs that belong together: a sequence's slices, a batched chunk, or loss groups."""
    stops = {c: group[-1] for group in joint_losses(chunks, loss_groups) for c in group}
    starts, reach = list[int](), -1
    for c, chunk in enumerate(chunks):
        if chunk.segments[0].start == 0 and c > reach:
            starts.append(c)
        reach = max(reach, stops.get(c, -1))
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(chunks)], strict=True)]


def runs_of(chunks: Sequence[Chunk], problem: Problem) -> Groups:
    """Return a table's runs (`slice_groups`), or groups of parts of them where a batch branches."""
    divided = batch_target(problem, "groups")
    return slice_groups(chunks) if divided is None else list(divided(chunks, problem))


def has_groups(loss_groups: Sequence[int]) -> bool:
    """Return True if some group has several sequences; `loss_groups` as in `Problem`."""
    return len(set(loss_groups)) < len(loss_groups)


def joint_losses(chunks: Sequence[Chunk], loss_groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """List the chunks whose losses are computed together, ascending: they have sequences of one group, or share such chunks."""
    if not loss_groups:
        return ()
    chunks_of: dict[int, set[int]] = {}
    for c, chunk in enumerate(chunks):
        for segment in chunk.segments:
            chunks_of.setdefault(loss_groups[segment.sequence], set()).add(c)
    return tuple(group for group in connected(chunks_of.values()) if len(group) > 1)


def stand_in(chunks: tuple[Chunk, ...], loss_groups: Sequence[int]) -> tuple[Chunk, ...]:
    """Return a table from which to order a table's actions: with each run (`slice_groups`) as the slices of one sequence."""
    if not has_groups(loss_groups):  # each sequence is a run already
        return chunks
    return as_slices(map(len, slice_groups(chunks, loss_groups)))


def as_slices(sizes: Iterable[int]) -> tuple[Chunk, ...]:
    """Return a table of sequences of so many slices, of one token each."""
    return tuple(Chunk((Segment(run, at, at + 1),)) for run, size in enumerate(sizes) for at in range(size))


def arranged(chunks: tuple[Chunk, ...], loss_groups: Sequence[int]) -> tuple[Chunk, ...]:
    """Move the sequences of a table so that groups stand together, each where its first sequence stood."""
    if not has_groups(loss_groups):
        return chunks
    together = connected(chain(joint_losses(chunks, loss_groups), slice_groups(chunks)))
    return tuple(chunks[c] for group in together for c in group)


def descending(groups: Groups) -> list[int]:
    """Return the chunks in the order of their backwards: group by group, the last slice of each first."""
    return [c for group in groups for c in reversed(group)]


def without_weights(order: Order) -> Order:
    return tuple(tuple(action for action in row if action.op is not Op.W) for row in order)
