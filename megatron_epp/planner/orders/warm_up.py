"""1F1B over slices with a warm-up window: from a chunk table and a number of stages to every rank's list of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Chunk
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.fit import step_bytes
from megatron_epp.planner.kernels.codes import BACKWARD, FORWARD, KIND_BITS, CodedOrder, Codes
from megatron_epp.planner.kernels.compiled import Numbers, integers
from megatron_epp.planner.order import Groups, Order, descending, runs_of, slice_groups
from megatron_epp.planner.tables import Tables


class OrderRule(Protocol):
    """Rule by which the search orders a chunk table. Equal rules are equal and hashable, so each is tried once per table.

    `settings.REACHES` lists the rules that are tried.
    """

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        """Order all actions: forwards and, unless `problem.forward_only`, whole backwards of every stage and chunk.

        The table is in forward order. It stands for all lockstep replicas, in which the same chunks are slices of one sequence.
        """
        ...


def elastic_1f1b(chunks: Sequence[Chunk], num_stages: int, forward_only: bool) -> Order:
    """1F1B over slices (Seq1F1B) of sequences with unequal numbers of them (InfiniPipe, section III-D).

    Forwards run with ascending slices, backwards with descending ones. Before its first backward a rank runs
    ``num_stages - rank - 1 + n`` forwards, n being the slices of the first sequence, and then keeps that many chunks alive: one
    forward per backward. Where the next sequence has fewer slices than the one whose backward just ended, the rank lets the
    window shrink by as much first. Sequences come with falling numbers of slices; with one each this is 1F1B.
    """
    groups = slice_groups(chunks)
    alive = [done + len(group) for done, group in enumerate(group for group in groups for _ in group)]
    return run_ahead(groups, num_stages, forward_only, lambda stage: [count + num_stages - stage - 1 for count in alive])


def run_ahead(groups: Groups, num_stages: int, forward_only: bool, ahead: Callable[[int], Sequence[int]]) -> Order:
    """Order each rank's forwards and backwards by how many forwards have run before each backward."""
    total = sum(map(len, groups))
    forwards = np.arange(total, dtype=np.int64) << KIND_BITS | FORWARD
    backwards = np.array(descending(groups), dtype=np.int64) << KIND_BITS | BACKWARD
    rows = [
        (forwards if forward_only else merged(forwards, backwards, ahead(stage))) + (stage * total << KIND_BITS)
        for stage in range(num_stages)
    ]
    return order_of(rows, total)


def merged(forwards: Numbers, backwards: Numbers, ahead: Sequence[int]) -> Numbers:
    """Put a rank's forwards, as codes, before backwards: ahead of each so many, of the last no fewer than of others."""
    assert len(ahead) == len(backwards)
    run = np.minimum(np.maximum.accumulate(np.array(ahead, dtype=np.int64)), len(forwards))
    row = np.empty((run[-1] if len(run) else 0) + len(backwards), dtype=np.int64)
    is_forward = np.ones(len(row), dtype=bool)
    is_forward[np.arange(len(backwards)) + run] = False
    row[is_forward], row[~is_forward] = forwards[: len(row) - len(backwards)], backwards
    return row


def order_of(rows: Sequence[Numbers], num_chunks: int) -> CodedOrder:
    return CodedOrder(Codes(integers(np.concatenate(rows)), integers(accumulate(map(len, rows), initial=0))), num_chunks)


def window_ahead(groups: Groups, minimal: bool) -> list[int]:
    """Compute how many forwards the last rank has run before each of its backwards: `minimal` up to the end of the backward's
    group; else the number of backwards before it plus its group's window (`windows_of`).
    """
    if minimal:
        return [group[-1] + 1 for group in groups for _ in group]
    return list(accumulate((done + window for done, window in enumerate(windows_of(groups))), max))


def windows_of(groups: Groups) -> list[int]:
    """Return, for each backward, the chunks alive ahead of its group's first one: of a sequence, its slices."""
    begins = accumulate(map(len, groups), initial=0)
    return [group[-1] + 1 - begin for group, begin in zip(groups, begins, strict=False) for _ in group]


@dataclass(frozen=True, slots=True)
class _Elastic1F1B:
    """Order rule of `elastic_1f1b`, for one stage on each rank, in order."""

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        return elastic_1f1b(chunks, problem.num_stages, problem.forward_only)


ELASTIC_1F1B = _Elastic1F1B()


@dataclass(frozen=True, slots=True)
class WarmUp:
    """1F1B with an elastic warm-up window: one stage per rank, each rank `lead` backwards ahead of the next.

    Let backward k belong to a sequence of n slices. With `minimal` the last rank runs before it the forwards up to the end of
    that sequence; otherwise k + n forwards, counting k from 0, as `elastic_1f1b` does. The rank r places before the last runs
    before its backward k what the last rank runs before its backward ``k + lead * r``. So all ranks run their forwards in the
    same groups, and no rank has to wait for forwards that another has put off.

    `minimal` keeps the fewest chunks alive: while the backwards of a long sequence run, the only forwards in between are those
    that later ranks need next. A lead of 1 is 1F1B: all ranks wait wherever two chunks differ in time. With a lead of 2, as
    many chunks wait between a rank and the next as there are ranks after it. Less than 1 is for short memory. By `slack`
    backwards all ranks are further ahead, so that the last one has something to run while the shards of the vocabulary exchange
    what its backward waits for.
    """

    lead: float
    minimal: bool = False
    slack: int = 0

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        num_stages, total, groups = problem.num_stages, len(chunks), runs_of(chunks, problem)
        last = window_ahead(groups, self.minimal)

        def ahead(stage: int) -> list[int]:
            # Halves go up: to even ones, as `round` has them, neighbours would in turn be equal and two apart.
            ahead_by = self.slack + math.floor(self.lead * (num_stages - 1 - stage) + 0.5)
            return [*last[ahead_by:], *[total] * min(ahead_by, total)]

        return run_ahead(groups, num_stages, problem.forward_only, ahead)


@dataclass(frozen=True, slots=True)
class CappedWarmUp:
    """`WarmUp` with the window between the smallest and the largest, backward by backward as the caps allow.

    While a long sequence is alive its slices leave room for few other chunks, and later for more. The window counts bytes
    without recompute: `room` times what the caps leave for activations. Above 1 some of them are given up by recompute.
    """

    lead: float
    room: float = 1.0
    slack: int = 0

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        if problem.forward_only:
            return WarmUp(self.lead, slack=self.slack).order(chunks, tables, problem)
        groups, stages, total = runs_of(chunks, problem), problem.num_stages, len(chunks)
        leads = [self.slack + math.floor(self.lead * (stages - 1 - stage) + 0.5) for stage in range(stages)]
        last = np.array(window_ahead(groups, minimal=False))
        for ahead_by, fitting in zip(leads, _fitting(groups, tables, problem, self.room), strict=True):
            last[ahead_by:] = np.minimum(last[ahead_by:], fitting[: max(0, total - ahead_by)])
        window = np.maximum.accumulate(np.maximum(last, window_ahead(groups, minimal=True))).tolist()
        return run_ahead(groups, stages, False, lambda stage: [*window[leads[stage] :], *[total] * min(leads[stage], total)])


def _fitting(groups: Groups, tables: Tables, problem: Problem, room: float) -> list[NDArray[np.int64]]:
    """Compute how many forwards each stage may have run before each of its backwards, without recompute."""
    total, stages = sum(map(len, groups)), problem.num_stages
    forwards = np.arange(total) << KIND_BITS | FORWARD
    backwards = np.array(descending(groups), dtype=np.int64) << KIND_BITS | BACKWARD
    firsts = np.arange(stages)[:, None] * (total << KIND_BITS)
    every = Codes(
        integers((firsts + np.concatenate((forwards, backwards))).ravel()),
        integers(range(0, 2 * total * stages + 1, 2 * total)),
    )
    fitting = []
    for cap, static, *sizes in zip(
        problem.cap_bytes, tables.static, *step_bytes(every, tables, [[0] * total] * stages), strict=True
    ):
        takes, stays = np.array(sizes[0]), np.array(sizes[0]) - np.array(sizes[1])
        alive = np.cumsum(stays[:total])
        freed = np.cumsum(stays[total:]) - stays[total:]
        fitting.append(np.searchsorted(alive, room * (cap - static) - freed - takes[total:], side="right"))
    return fitting
