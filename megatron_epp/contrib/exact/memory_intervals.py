"""Memory in the constraint program: what each rank holds on the device and in host memory, as intervals with demands.

Memory is counted as in `simulate`: a compute action allocates when it starts and frees when it ends, and a copy that starts or
ends while a compute action runs counts for all of that action.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from megatron_epp.contrib.exact.added import rank_of
from megatron_epp.contrib.exact.program import Program
from megatron_epp.plan import Action, Op, is_unlimited
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.kv_offload import in_units
from megatron_epp.plan.operations import operation

MOST_LAYERS = 6
"""Sizes up to which a demand is written as one interval of fixed height for each."""


class Demand(NamedTuple):
    """Bytes held over a time: the value of the choice made for a stage and chunk."""

    start: Any
    end: Any
    num_bytes: tuple[int, ...]
    stage: int
    chunk: int


class Memory:
    """Memory of every rank, as constraints of a program.

    Args:
        caps: bytes of the ranks.
        host_cap: bytes that each rank may have in host memory.
    """

    def __init__(self, program: Program, caps: Sequence[int], host_cap: int) -> None:
        self.program, self.caps, self.host_cap = program, caps, host_cap
        self.issued: dict[tuple[int, int], Any] = {}

    def add(self) -> None:
        """Add all constraints."""
        tables, added = self.program.tables, self._of_added()
        for rank, stages in enumerate(tables.stages_of):
            self._add_issues(rank)
            demands = [demand for stage in stages for demand in self._of_stage(stage)]
            demands += added.get(rank, ())
            self._limit(demands, self.caps[rank] - tables.static[rank] + tables.added_room[rank])
            if not is_unlimited(self.host_cap):
                self._limit([demand for stage in stages for demand in self._in_host(stage)], self.host_cap)

    def _add_issues(self, rank: int) -> None:
        """Add the time from which each load takes memory: its start, or the start of the compute action that then runs."""
        model, spans, tables = self.program.model, self.program.spans, self.program.tables
        own = {action: span for action, span in spans.items() if rank_of(action, tables) == rank}
        compute = [span.whole for action, span in own.items() if action.op not in (Op.O, Op.L)]
        points = []
        for action, span in own.items():
            if action.op is Op.L:
                at = model.new_int_var(0, self.program.horizon, f"issue of {action}")
                model.add(at <= span.start).only_enforce_if(span.present)
                points.append(self.program.interval(at, 0, at, span.present))
                self.issued[action.stage, action.chunk] = at
        for point in points:
            model.add_no_overlap([*compute, point])  # not within an action

    def _of_added(self) -> dict[int, list[Demand]]:
        """Return what added operations hold, by rank."""
        by_rank: dict[int, list[Demand]] = {}
        for rank, c, changes in changes_of(self.program):
            count = len(self.program.choices[0][c])
            for start, end, size in opened(changes, self.program.horizon):
                by_rank.setdefault(rank, []).append(Demand(start, end, (size,) * count, 0, c))
        return by_rank

    def _of_stage(self, stage: int) -> Iterator[Demand]:
        program, tables = self.program, self.program.tables
        for c in range(len(program.chunks)):
            choices = program.choices[stage][c]
            forward, backward = (program.spans[Action(op, stage, c)] for op in (Op.F, Op.B))
            stays = tuple(choice.kept_bytes - choice.moved_bytes for choice in choices)
            yield Demand(forward.start, backward.end, stays, stage, c)
            yield Demand(backward.start, backward.end, tuple(choice.takes_bytes for choice in choices), stage, c)
            if any(choice.moved_bytes for choice in choices):
                moved = tuple(choice.moved_bytes for choice in choices)
                gone, issued = program.spans[Action(Op.O, stage, c)], self.issued[stage, c]
                yield Demand(forward.start, gone.end, moved, stage, c)
                yield Demand(issued, backward.end, moved, stage, c)
            if any(choice.split for choice in choices):
                weight = program.spans[Action(Op.W, stage, c)]
                held = tuple(int(tables.passes[stage].weight_bytes[c]) if choice.split else 0 for choice in choices)
                yield Demand(backward.end, weight.end, held, stage, c)
        yield from self._of_caches(stage)

    def _of_caches(self, stage: int) -> Iterator[Demand]:
        """Yield keys, values and their gradients: what the actions of a chain of slices open until one of them closes it."""
        program, tables = self.program, self.program.tables
        links = slice_neighbours(program.chunks)
        for first in range(len(program.chunks)):
            if links.previous[first]:
                continue
            chain = [first]
            for c in chain:
                chain += links.following[c]
            passes = tables.passes[stage]
            changes = [(program.spans[Action(Op.F, stage, c)].start, int(passes.forward_alloc[c])) for c in chain]
            changes += [(program.spans[Action(Op.F, stage, c)].end, -int(passes.forward_free[c])) for c in chain]
            changes += [(program.spans[Action(Op.B, stage, c)].end, int(passes.backward_residual[c])) for c in chain[::-1]]
            count = len(program.choices[stage][first])
            for start, end, size in opened(changes, program.horizon):
                yield Demand(start, end, (size,) * count, stage, first)

    def _in_host(self, stage: int) -> Iterator[Demand]:
        for c, choices in enumerate(self.program.choices[stage]):
            if any(choice.moved_bytes for choice in choices):
                sizes = tuple(in_units(choice.moved_bytes) for choice in choices)
                yield Demand(self.program.spans[Action(Op.O, stage, c)].start, self.issued[stage, c], sizes, stage, c)

    def _limit(self, demands: Sequence[Demand], room: int) -> None:
        """Add that the demands never exceed the room."""
        demands = [demand for demand in demands if any(demand.num_bytes)]
        if sum(max(demand.num_bytes) for demand in demands) <= room:
            return
        program, model = self.program, self.program.model
        unit = max(1, math.gcd(*(size for demand in demands for size in demand.num_bytes)))
        intervals, amounts = [], []
        for demand in demands:
            sizes = [size // unit for size in demand.num_bytes]
            if len(set(sizes)) <= MOST_LAYERS:
                parts = [(size, [own >= least for own in sizes]) for least, size in layers(sizes)]
            else:
                amount = model.new_int_var(min(sizes), max(sizes), "")
                model.add(amount == program.weighed(demand.stage, demand.chunk, sizes))
                parts = [(amount, [True])]
            for amount, holds in parts:
                lasts = model.new_int_var(0, program.horizon, "")
                present = program.any_of(demand.stage, demand.chunk, holds)
                intervals.append(program.interval(demand.start, lasts, demand.end, present))
                amounts.append(amount)
        model.add_cumulative(intervals, amounts, room // unit)


def changes_of(program: Program) -> Iterator[tuple[int, int, list[tuple[Any, int]]]]:
    """Yield rank, chunk, and the times and signed bytes of what added operations of a site hold, in the order of the table."""
    added = program.tables.added
    of_sites: dict[tuple[int, ...], list[Op]] = {}
    for op in added:
        of_sites.setdefault(tuple(operation(op).sites(program.tables.rank_of)), []).append(op)
    for ranks, ops in of_sites.items():
        for (site, rank), c in product(enumerate(ranks), range(len(program.chunks))):
            changes: list[tuple[Any, int]] = []
            for op in ops:
                span = program.spans[Action(op, site, c)]
                changes += [(span.start, added[op].takes[site][c]), (span.end, -added[op].gives[site][c])]
            yield rank, c, changes


def layers(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(least, bytes)``: a size is the sum of the bytes of all layers that begin at it or below."""
    below = 0
    for size in sorted({size for size in sizes if size > 0}):
        yield size, size - below
        below = size


def opened(changes: Sequence[tuple[Any, int]], horizon: int) -> Iterator[tuple[Any, Any, int]]:
    """Yield what is held between changes as ``(start, end, bytes)``: each release is of what was opened last.

    Args:
        changes: times and signed bytes, in the order in which they happen.
    """
    stack: list[tuple[Any, int]] = []
    for time, delta in changes:
        if delta > 0:
            stack.append((time, delta))
        while delta < 0 and stack:
            start, size = stack.pop()
            released = min(size, -delta)
            yield start, time, released
            delta += released
            if size > released:
                stack.append((start, size - released))
    yield from ((start, horizon, size) for start, size in stack)
