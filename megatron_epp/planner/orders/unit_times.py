"""Greedy order in units of time on two stages per rank in a V, in which F, B and W take one each (ZB-V, 2401.10241).

A rank prefers a backward, then a forward while it keeps few enough, then the weight gradient that has waited longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.placement import Placement
from megatron_epp.planner.order import Order, descending, slice_groups, without_weights
from megatron_epp.planner.orders.patterns import is_v, running
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Order rule for two stages per rank in a V: the greedy order in units of time. Elsewhere it is list scheduling."""

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        """Order all actions. Arguments as in `OrderRule.order`."""
        own = Placement("v", problem.num_ranks, 2)
        made = (without_weights(in_unit_times(slice_groups(chunks), own)),) if is_v(problem) else ()
        return running(made, chunks, tables, problem)


def in_unit_times(groups: Sequence[range], placement: Placement) -> Order:
    """Order the actions of every rank, weight gradients split off.

    Sequences with slices have as many more forwards alive, since the first backward follows the forwards of all slices.

    Args:
        groups: `slice_groups` of the chunk table.
        placement: two stages on each rank in a V.
    """
    return _Units(groups, placement).run()


class _Units:
    """Run of a pipeline in units of time.

    Args:
        groups, placement: as `in_unit_times` takes them.
    """

    def __init__(self, groups: Sequence[range], placement: Placement) -> None:
        ranks, stages = placement.num_ranks, placement.num_stages
        self._stages = [placement.stages(rank) for rank in range(ranks)]
        self._backwards, self._total = descending(groups), groups[-1].stop
        self._most_kept = 2 * (ranks + max(map(len, groups)) - 1)
        self._begun = {Op.F: [0] * stages, Op.B: [0] * stages}
        self._ended: dict[Action, int] = {}
        self._waiting: list[deque[Action]] = [deque() for _ in self._stages]
        self._kept = [0] * ranks

    def run(self) -> Order:
        """Return the order of every rank's actions."""
        rows: list[list[Action]] = [[] for _ in self._stages]
        unit, left = 0, 3 * self._total * sum(map(len, self._stages))
        while left:
            chosen = [(rank, found) for rank in range(len(rows)) if (found := self._next(rank, unit)) is not None]
            for rank, action in chosen:
                self._begin(rank, action, unit)
                rows[rank].append(action)
            unit, left = unit + 1, left - len(chosen)
        return tuple(map(tuple, rows))

    def _next(self, rank: int, unit: int) -> Action | None:
        """Return what a rank begins at a unit of time; None if nothing is ready."""
        for stage in reversed(self._stages[rank]):
            done, last = self._begun[Op.B][stage], len(self._begun[Op.B]) - 1
            if done < self._total:
                action = Action(Op.B, stage, self._backwards[done])
                above = action._replace(stage=stage + 1) if stage < last else action._replace(op=Op.F)
                if self._has_ended(unit, above, action._replace(op=Op.F)):
                    return action
        for stage in reversed(self._stages[rank]):
            done = self._begun[Op.F][stage]
            if done < self._total and self._kept[rank] < self._most_kept:
                action = Action(Op.F, stage, done)
                if stage == 0 or self._has_ended(unit, action._replace(stage=stage - 1)):
                    return action
        return self._waiting[rank][0] if self._waiting[rank] else None

    def _has_ended(self, unit: int, *actions: Action) -> bool:
        return all(self._ended.get(action, unit + 1) <= unit for action in actions)

    def _begin(self, rank: int, action: Action, unit: int) -> None:
        self._ended[action] = unit + 1
        if action.op is Op.W:
            self._waiting[rank].popleft()
            self._kept[rank] -= 1
            return
        self._begun[action.op][action.stage] += 1
        if action.op is Op.F:
            self._kept[rank] += 1
        else:
            self._waiting[rank].append(action._replace(op=Op.W))
