"""A plan's steps and actions as columns of numbers, for code that looks at all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.operations import Track, is_defined, operation
from megatron_epp.plan.plan import AnyStep, Plan

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Bytes = npt.NDArray[Any]
"""Numbers of bytes, whose sums are exact."""

NO_STEP = -1
_MOST_SUM = 1 << 62


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """The steps of a plan, numbered along the tracks, and their actions in that order.

    A track is a list that runs one step at a time: the compute list of every rank, then the copy list of every rank.
    """

    steps: list[AnyStep]
    tracks: list[range]  # the numbers of each track's steps; copies of rank ``r`` are track ``num_ranks + r``
    num_ranks: int
    time_us: Floats
    alloc_bytes: Bytes
    free_bytes: Bytes
    ops: tuple[Op, ...]  # operations that occur
    op: Integers  # operation of each action, an index in `ops`
    site: Integers  # of each action
    chunk: Integers  # of each action
    step: Integers  # of each action

    @property
    def num_compute(self) -> int:
        """Number of steps that are not copies, which come first."""
        return self.tracks[self.num_ranks - 1].stop if self.num_ranks else 0

    def action(self, index: int) -> Action:
        return Action(self.ops[self.op[index]], int(self.site[index]), int(self.chunk[index]))

    def of(self, op: Op) -> Integers:
        return np.flatnonzero(self.op == self.ops.index(op)) if op in self.ops else np.zeros(0, dtype=np.int64)

    def without_copies(self) -> PlanColumns:
        """Return the compute steps alone, with the same numbers."""
        steps, actions = slice(self.num_compute), slice(int(np.searchsorted(self.step, self.num_compute)))
        return replace(
            self,
            steps=self.steps[steps],
            tracks=self.tracks[: self.num_ranks],
            **{name: getattr(self, name)[steps] for name in ("time_us", "alloc_bytes", "free_bytes")},
            **{name: getattr(self, name)[actions] for name in ("op", "site", "chunk", "step")},
        )

    def ranks(self) -> Integers:
        return np.repeat(np.arange(len(self.tracks)) % self.num_ranks, list(map(len, self.tracks)))

    def where(self, number: int) -> tuple[int, int]:
        """Rank of a step, and its position in its track."""
        for track, numbers in enumerate(self.tracks):
            if number in numbers:
                return track % self.num_ranks, number - numbers.start
        raise IndexError(f"step {number} of a plan of {len(self.steps)}")


def columns_of(plan: Plan) -> PlanColumns:
    rows: list[tuple[AnyStep, ...]] = [*plan.ranks, *(plan.copies or ((),) * plan.num_ranks)]
    steps = list(chain.from_iterable(rows))
    tracks = [range(*ends) for ends in pairwise(accumulate(map(len, rows), initial=0))]
    actions, times_us, allocated, freed, last = zip(*steps, strict=True) if steps else ((),) * 5
    numbers, num_compute = np.arange(len(steps)), sum(map(len, plan.ranks))
    if any(last[:num_compute]):  # `Step.also`
        counts = [len(step.actions) for step in steps]
        actions, numbers = tuple(chain.from_iterable(step.actions for step in steps)), np.repeat(numbers, counts)
    names, sites, chunks = zip(*actions, strict=True) if actions else ((),) * 3
    index = {op: at for at, op in enumerate(dict.fromkeys(names))}
    return PlanColumns(
        steps,
        tracks,
        plan.num_ranks,
        np.array(times_us, dtype=np.float64),
        byte_column(allocated),
        byte_column(freed),
        tuple(index),
        np.array(list(map(index.__getitem__, names)), dtype=np.int64),
        np.array(sites, dtype=np.int64),
        np.array(chunks, dtype=np.int64),
        numbers,
    )


def byte_column(values: Sequence[int]) -> Bytes:
    """Return numbers of bytes as an array: of 64-bit integers, or of Python's own where sums could be larger than these."""
    column = np.array(values, dtype=np.float64)
    return np.array(values, dtype=np.int64 if np.abs(column).sum() < _MOST_SUM else object)


@dataclass(frozen=True, slots=True)
class Listed:
    """The steps in which a plan has each action."""

    # By operation, the number of the step, ``[site][chunk]``; `NO_STEP` if the plan does not have the action
    numbers: Mapping[Op, Integers]
    ops: frozenset[Op]  # operations with an action in a list into which they belong
    unknown: Integers  # indices of actions that do not belong into their list, or are of a site or chunk that does not exist
    repeated: Integers  # indices of other actions that occur before

    def number(self, action: Action) -> int | None:
        """Number of the step of an action; None if the plan does not have it."""
        op, site, chunk = action
        steps = self.numbers.get(op)
        if steps is None or not (0 <= site < steps.shape[0] and 0 <= chunk < steps.shape[1]) or steps[site, chunk] == NO_STEP:
            return None
        return int(steps[site, chunk])

    def table(self, op: Op, num_sites: int, num_chunks: int) -> Integers:
        """Return the entry of an operation in `numbers`, or one without steps."""
        steps = self.numbers.get(op)
        return np.full((num_sites, num_chunks), NO_STEP) if steps is None else steps


def listed(plan: Plan, columns: PlanColumns) -> Listed:
    """Find the step of every action of a plan that has a stage, and tables of the right shapes."""
    op, site, chunk, num_chunks = columns.op, columns.site, columns.chunk, len(plan.chunks)
    kinds = [operation(op) if is_defined(op) else None for op in columns.ops]
    sizes = np.array([0 if kind is None else len(kind.sites(plan.placement)) for kind in kinds], dtype=np.int64)
    bases = np.append(0, np.cumsum(sizes * num_chunks))
    is_copy = np.array([kind is not None and kind.track is Track.COPY for kind in kinds], dtype=bool)
    is_compute = np.array([kind is not None and kind.track is Track.COMPUTE for kind in kinds], dtype=bool)
    is_listed = np.where(columns.step < columns.num_compute, is_compute[op], is_copy[op])
    is_known = is_listed & (site >= 0) & (site < sizes[op]) & (chunk >= 0) & (chunk < num_chunks)
    known = np.flatnonzero(is_known)
    keys = bases[op[known]] + site[known] * num_chunks + chunk[known]
    last = np.full(bases[-1], NO_STEP)
    last[keys] = known
    repeated = known[:0]
    if (last[keys] != known).any():
        order = np.argsort(keys, kind="stable")
        repeated = np.sort(known[order[1:][keys[order[1:]] == keys[order[:-1]]]])
    steps = np.append(columns.step, NO_STEP)[last]  # NO_STEP is the index of the last entry
    tables = {
        kind: steps[first : first + size * num_chunks].reshape(size, num_chunks)
        for kind, first, size in zip(columns.ops, bases.tolist(), sizes.tolist(), strict=False)
    }
    ops = frozenset(columns.ops[number] for number in np.unique(op[is_listed]).tolist())
    return Listed(tables, ops, np.flatnonzero(~is_known), repeated)


def entries(rows: Sequence[Sequence[float]]) -> Floats:
    """Return the numbers of rows, which may differ in length, one row after another."""
    return np.array(list(chain.from_iterable(rows)), dtype=np.float64)


def positions(rows: Sequence[Sequence[float]], chosen: Booleans) -> Iterator[tuple[int, int]]:
    """Yield row and position of every number that is chosen, one flag for each in the result of `entries`."""
    if chosen.any():
        sizes = list(map(len, rows))
        row = np.repeat(np.arange(len(sizes)), sizes)[chosen]
        starts = np.cumsum(sizes) - sizes
        yield from zip(row.tolist(), (np.flatnonzero(chosen) - starts[row]).tolist(), strict=True)
