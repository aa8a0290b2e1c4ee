"""Steps of two actions: which of an order run together, and how long both take.

While one of the two exchanges activations between tensor-parallel ranks, the other computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Action, Op, Step
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner.assemble import written
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import Sharing
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables

Joined = frozenset[tuple[Action, Action]]
"""Pairs of actions of a rank that run in one step; an action is in one pair at most."""


class JoinedOrder(NamedTuple):
    """Order in which some neighbouring actions run in one step."""

    rows: Order
    joined: Joined


class Passing(NamedTuple):
    """Time of an action by itself, and the part of it that is exchange, in microseconds."""

    time_us: float
    exchange_us: float


def adjacent(order: Order, joined: Joined) -> Joined:
    """Return the pairs that still stand one after the other, after actions were added to an order or taken out of it."""
    return frozenset(pair for row in order for pair in pairwise(row) if pair in joined) if joined else joined


def joined_us(first: Passing, second: Passing) -> float:
    """Compute the time of two actions in one step, in microseconds.

    The exchange of each is overlapped with the compute of the other, as far as that lasts; two computations share the device,
    so their times add up. Recompute in a backward counts as compute, its own exchange included.
    """
    exchange_us, other_exchange_us = (min(each.exchange_us, each.time_us) for each in (first, second))
    compute_us, other_compute_us = first.time_us - exchange_us, second.time_us - other_exchange_us
    return max(exchange_us, other_compute_us) + max(other_exchange_us, compute_us)


def joined_bytes(joined: Joined, row: Sequence[Action], tables: Tables, takes: list[int], gives: list[int]) -> None:
    """Let both actions of a step allocate when the first starts and free when the second ends.

    A rank's static bytes have room for one pass; a step of two also needs the room of the smaller one.

    Args:
        takes, gives: bytes that every action allocates when it starts and frees when it ends; changed in place.
    """
    for at, pair in enumerate(pairwise(row)):
        if pair in joined:
            more = min(int(tables.passes[stage].passing[chunk]) for _, stage, chunk in pair)
            takes[at], takes[at + 1] = takes[at] + takes[at + 1] + more, 0
            gives[at], gives[at + 1] = 0, gives[at] + gives[at + 1] + more


@dataclass(frozen=True, slots=True)
class JoinedDecisions(Decisions):
    """Decisions with steps of two actions.
    `joined` are pairs of actions that stand one after the other in `order` and run in one step, each in one pair at most.
    """

    joined: Joined = frozenset()

    def makespan_us(self, problem: Problem, costs: Costs) -> float:
        """Compute the makespan, in microseconds, by simulation: the planner's clock runs actions one by one."""
        return simulate(written(problem, costs, Options(), self, self.tables(problem, costs))).makespan_us

    def reordered(self, order: Order) -> JoinedDecisions:
        """Return the decisions with another order; pairs between which an action now stands run one by one."""
        return replace(self, order=order, joined=adjacent(order, self.joined))

    def faults(self) -> Iterator[str]:
        """Yield pairs that are no step: they do not stand one after the other, or one action is in two pairs."""
        seen: set[Action] = set()
        for first, second in sorted(self.joined - adjacent(self.order, self.joined)):
            yield f"joined has {first} and {second}, which no rank runs one after the other"
        for action in sorted(action for pair in self.joined for action in pair):
            if action in seen:
                yield f"joined has {action} in two pairs; a step has two actions"
            seen.add(action)

    @property
    def sharing(self) -> Sharing | None:
        """Both actions of a step hold their bytes at once."""
        return partial(joined_bytes, self.joined) if self.joined else None

    def steps(self, row: Sequence[Step], tables: Tables) -> Sequence[Step]:
        """Return the steps of a rank with the pairs joined."""
        steps, follows = list[Step](), dict(self.joined)
        for step in row:
            if steps and follows.get(steps[-1].action) == step.action:
                first = steps.pop()
                time_us = joined_us(_passing(first, tables), _passing(step, tables))
                step = Step(first.action, time_us, first.alloc_bytes, step.free_bytes, (step.action,))
            steps.append(step)
        return steps


def _passing(step: Step, tables: Tables) -> Passing:
    """Return the time of an action by itself, with its exchange; weight gradients exchange nothing."""
    op, stage, c = step.action
    return Passing(step.time_us, float(tables.passes[stage].exchange_us[c]) if op in (Op.F, Op.B) else 0.0)
