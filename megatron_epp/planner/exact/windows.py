"""Earliest starts of the actions of a chunk table, and least times that remain after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.plan import Chunk, Op
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.planner.tables import Tables, Times

Item = tuple[Op, int]
"""An action of a given stage: its kind and chunk."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Times ``[stage][chunk]`` in units of a horizon, for one stage on each rank.

    Whatever the order, a chunk comes through all earlier stages before it comes to a stage, a slice after the slices before
    it, and backwards the other way round.

    Attributes:
        forward, backward: least duration; a backward's is without recompute and without what can be split off.
        weight: of the weight gradient where it can be split off, else zero.
        layer: each recomputed layer adds.
        hop: message ``[boundary][chunk]``.
        forward_head, backward_head: earliest start.
        forward_tail, backward_tail: least time from the end of the action to the end of the last.
    """

    forward: Times
    backward: Times
    weight: Times
    layer: Times
    hop: Times
    forward_head: Times
    backward_head: Times
    forward_tail: Times
    backward_tail: Times

    @staticmethod
    def of(chunks: Sequence[Chunk], tables: Tables, horizon_us: float, split: bool) -> Windows:
        """Compute the windows of a chunk table.

        Args:
            chunks: the chunk table.
            tables: its times and sizes.
            horizon_us: the unit of all times.
            split: weight gradients can run as actions of their own, where anything is held for them.
        """

        def scaled(times: Times) -> Times:
            return [[time_us / horizon_us for time_us in row] for row in times]

        links = slice_neighbours(chunks)
        ascending = sorted(range(len(chunks)), key=lambda c: chunks[c].segments[0].start)
        forward, hop = scaled(tables.forward_us), scaled(tables.hops)
        rows = zip(tables.weight_us, tables.weight_bytes, strict=True)
        weight_us = [[time_us if split and held else 0.0 for time_us, held in zip(*row, strict=True)] for row in rows]
        weight = scaled(weight_us)
        backward = _plus(scaled(tables.backward_us), weight, -1.0)
        forward_head = _along(forward, hop, links.previous, ascending)
        backward_tail = _along(backward, hop, links.previous, ascending)
        descending = ascending[::-1]
        backward_head = _back(backward, hop, links.following, descending, _plus(forward_head, forward))
        forward_tail = _back(forward, hop, links.following, descending, _plus(backward_tail, backward))
        rest = backward, weight, scaled(tables.layer_us), hop
        return Windows(forward, *rest, forward_head, backward_head, forward_tail, backward_tail)

    def least(self, s: int, item: Item) -> float:
        """Least duration of an action."""
        op, c = item
        return {Op.F: self.forward, Op.B: self.backward}[op][s][c] if op is not Op.W else 0.0

    def head(self, s: int, item: Item) -> float:
        """Earliest start of an action."""
        op, c = item
        return (
            self.forward_head[s][c] if op is Op.F else self.backward_head[s][c] + (self.backward[s][c] if op is Op.W else 0.0)
        )

    def tail(self, s: int, item: Item) -> float:
        """Least time from an action's end to the end of all."""
        op, c = item
        return {Op.F: self.forward_tail, Op.B: self.backward_tail}[op][s][c] if op is not Op.W else 0.0


def _along(times: Times, hop: Times, previous: Sequence[int | None], ascending: Sequence[int]) -> Times:
    """The longest way to every action through earlier stages and earlier slices."""
    ways: Times = []
    for stage, row in enumerate(times):
        way = [0.0] * len(row)
        for c in ascending:
            if stage:
                way[c] = ways[-1][c] + times[stage - 1][c] + hop[stage - 1][c]
            before = previous[c]
            if before is not None:
                way[c] = max(way[c], way[before] + row[before])
        ways.append(way)
    return ways


def _back(times: Times, hop: Times, following: Sequence[int | None], descending: Sequence[int], least: Times) -> Times:
    """The longest way to every action through later stages and later slices, and at least `least`."""
    ways = [list(row) for row in least]
    for stage in reversed(range(len(times))):
        for c in descending:
            if stage + 1 < len(times):
                ways[stage][c] = max(ways[stage][c], ways[stage + 1][c] + times[stage + 1][c] + hop[stage][c])
            after = following[c]
            if after is not None:
                ways[stage][c] = max(ways[stage][c], ways[stage][after] + times[stage][after])
    return ways


def _plus(one: Times, other: Times, sign: float = 1.0) -> Times:
    return [[a + sign * b for a, b in zip(*rows, strict=True)] for rows in zip(one, other, strict=True)]
