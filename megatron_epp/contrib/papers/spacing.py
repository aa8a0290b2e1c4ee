"""Interleaved orders in which chunks follow each other at equal distances, as units of time: F takes one, B with W two.

A chunk's forwards and backwards on a rank's stages then are equally far apart for all chunks, so every stage of a rank keeps a
number of chunks that does not change over time; chunks of its first stage live longest. Memory grows with the distances, so
`Spacing` takes the smallest with which ranks never wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from megatron_epp.contrib.papers.rows import with_waiting
from megatron_epp.plan import Action, Op
from megatron_epp.plan.placement import Placement
from megatron_epp.planner.order import Order, descending, without_weights

CHUNK = 3
"""Units of time of a chunk on a stage: F, B and W."""
UNITS = 1.0, 2.0
"""Units of time from rank to rank, of a forward and of a whole backward."""
SPLIT_UNITS = 1.5, 1.5
"""The same with weight gradients split off: a backward need not wait for one, so a forward and a backward share three units."""


@dataclass(frozen=True, slots=True)
class Spacing:
    """Distances between the actions of a chunk on a rank."""

    group: int  # chunks that follow each other on a stage before the rank turns to its next stage
    forward: int  # between the forwards of a chunk on a stage of a rank and on the next, in lengths of a group
    backward: int  # the same between backwards

    @staticmethod
    def of(ranks: int, laps: int, group: int, units: tuple[float, float]) -> Spacing:
        """Return the least distances in which a chunk comes round the ranks.

        `units` are of time between a forward on a rank and on the next, and between backwards.
        """
        lengths = (_coprime(math.ceil(ranks * each / (CHUNK * group)), laps) for each in units)
        return Spacing(group, *lengths)

    def order(self, groups: Sequence[range], placement: Placement) -> Order:
        """Order the actions of every rank, W right after its B.

        The first backward of a sequence follows the forwards of all its slices, so with slices all backwards are later.
        """
        return tuple(self._row(groups, placement, rank) for rank in range(placement.num_ranks))

    def _row(self, groups: Sequence[range], placement: Placement, rank: int) -> tuple[Action, ...]:
        ranks, stages, late = placement.num_ranks, placement.stages(rank), max(map(len, groups)) - 1
        backwards = descending(groups)
        units: dict[int, Action] = {}
        for lap, stage in enumerate(stages):
            for c in range(groups[-1].stop):
                units[self._start(c, len(stages), self.forward * lap) + rank] = Action(Op.F, stage, c)
        first = CHUNK * self.group * self.forward * (len(stages) - 1) + CHUNK * ranks - 2 - 2 * rank
        for lap, stage in enumerate(reversed(stages)):
            for number, c in enumerate(backwards, late):
                units[self._start(number, len(stages), self.backward * lap) + first] = Action(Op.B, stage, c)
        return tuple(with_waiting([units[unit] for unit in sorted(units)], 0))

    def _start(self, number: int, laps: int, groups_later: int) -> int:
        """Return the unit of time of a chunk on a lap, counted from the first chunk on the first lap."""
        group, at = divmod(number, self.group)
        return CHUNK * (self.group * (laps * group + groups_later) + at)


def whole_backwards(groups: Sequence[range], placement: Placement, units: tuple[float, float] = UNITS) -> Order:
    """Return the order of least distances without W."""
    order = Spacing.of(placement.num_ranks, placement.num_chunks, 1, units).order(groups, placement)
    return without_weights(order)


def _coprime(least: int, laps: int) -> int:
    """Return the least number from `least` without a common divisor with the stages of a rank: then no two passes coincide."""
    return next(number for number in count(max(1, least)) if math.gcd(number, laps) == 1)
