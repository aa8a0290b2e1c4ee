"""Squeezing of a pattern in units of time: every action as early as its inputs, its rank and the memory of the pattern allow.

It is the second step of Pipeline Parallelism with Controllable Memory (2405.15362): a repeated block leaves gaps where its
first and last copies have no neighbours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_epp.plan import Action, Op
from megatron_epp.planner.order import Order

UnitTimes = Mapping[int, Action]
"""Forwards and backwards of a rank by the unit of time in which they run, each after its inputs.

Weight gradients take the units that are left, the one that has waited longest first.
"""


def squeezed(rows: Sequence[UnitTimes]) -> Order:
    """Order the actions of every rank, weight gradients split off.

    No more weight gradients wait than there are ranks, for what they need is never recomputed: with slices, which take many
    forwards alive, all of them could wait for the end otherwise.
    """
    ranks = [_Rank(row) for row in rows]
    most = _Counts(max(rank.peak for rank in ranks), len(ranks))
    deepest = max(action.stage for row in rows for action in row.values())
    ends: dict[Action, int] = {}
    previous: dict[tuple[Op, int], int] = {}
    in_time = sorted((unit, number, action) for number, row in enumerate(rows) for unit, action in row.items())
    for unit, number, action in in_time:
        of_stage = action.op, action.stage
        ready = max(previous.get(of_stage, 0), ends.get(_input(action, deepest), 0))
        previous[of_stage] = ends[action] = 1 + ranks[number].move(unit, ready, most)
    return tuple(rank.order() for rank in ranks)


def laid_out(rows: Sequence[UnitTimes]) -> Order:
    """Order the actions of every rank as the pattern has them. Arguments as in `squeezed`."""
    return tuple(_Rank(row).order() for row in rows)


def _input(action: Action, deepest: int) -> Action:
    """Return the action of the same chunk that another follows; one that no stage has for the first stage's forward."""
    if action.op is Op.F:
        return action._replace(stage=action.stage - 1)
    return action._replace(stage=action.stage + 1) if action.stage < deepest else action._replace(op=Op.F)


class _Counts(NamedTuple):
    """Numbers of forwards whose activations a rank keeps, and of weight gradients that wait."""

    activations: int
    waiting: int

    def after(self, action: Action | None) -> _Counts:
        """Return the counts after an action, or where there is none after the weight gradient that runs instead."""
        if action is None:
            return _Counts(self.activations - 1, self.waiting - 1) if self.waiting else self
        return _Counts(self.activations + 1, self.waiting) if action.op is Op.F else _Counts(self.activations, self.waiting + 1)


class _Rank:
    """Forwards and backwards of a rank, which move."""

    def __init__(self, row: UnitTimes) -> None:
        self._row = dict(row)
        self._before = [_Counts(0, 0)]
        for unit in range(max(row) + len(row) + 1):
            self._before.append(self._before[-1].after(row.get(unit)))

    @property
    def peak(self) -> int:
        return max(counts.activations for counts in self._before)

    def move(self, unit: int, earliest: int, most: _Counts) -> int:
        """Move an action to the first unit that is free and keeps the rank within its limits; return the unit.

        Args:
            earliest: unit at which its inputs are there.
        """
        action = self._row.pop(unit)
        for at in range(earliest, unit):
            if at not in self._row:
                self._row[at] = action
                if self._update(at, unit, most):
                    return at
                del self._row[at]
        self._row[unit] = action
        return unit

    def _update(self, first: int, last: int, most: _Counts) -> bool:
        """Count again after a change; return False, and leave the counts as they were, if they exceed the limits.

        Args:
            first, last: units between which an action has moved. Weight gradients run at other times until somewhat later.
        """
        updated = [self._before[first]]
        for unit in range(first, len(self._before) - 1):
            updated.append(updated[-1].after(self._row.get(unit)))
            if updated[-1].activations > most.activations or updated[-1].waiting > most.waiting:
                return False
            if unit >= last and updated[-1] == self._before[unit + 1]:
                break
        self._before[first : first + len(updated)] = updated
        return True

    def order(self) -> tuple[Action, ...]:
        actions: list[Action] = []
        waiting: deque[Action] = deque()
        for unit in range(len(self._before)):
            action = self._row.get(unit)
            if action is not None:
                actions.append(action)
                if action.op is Op.B:
                    waiting.append(action._replace(op=Op.W))
            elif waiting:
                actions.append(waiting.popleft())
        return tuple(actions)
