"""How good an order is, without building a plan: the same arithmetic as `simulate`, reduced to what a search asks for."""

from __future__ import annotations

from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Sizes, Tables, Times
from megatron_epp.schedule import Op, PlanError

Layers = Sizes
"""Recomputed layers, ``[stage][chunk]``."""


def backward_times(tables: Tables, layers: Layers) -> Times:
    """Backward times with recompute, ``[stage][chunk]``; no rows in a forward-only plan."""
    if not tables.backward_us:
        return []
    return [
        [base + count * layer for base, count, layer in zip(*rows, strict=True)]
        for rows in zip(tables.backward_us, layers, tables.layer_us, strict=True)
    ]


def makespan_us(order: Order, tables: Tables, layers: Layers) -> float:
    """End of the last action, equal to what `simulate` says of the plan.

    The order must have the slices of a sequence ascending in forward and descending in backward on every rank, which is then
    all they ask for; `check` has the last word on that.

    Raises:
        PlanError: the order deadlocks.
    """
    stages = len(order)
    backward = backward_times(tables, layers)
    message = tables.message_us
    chunks = len(message)
    # When the input of an action has arrived; None while it has not.
    forward_in: list[list[float | None]] = [[0.0 if stage == 0 else None] * chunks for stage in range(stages)]
    backward_in: list[list[float | None]] = [[0.0 if stage == stages - 1 else None] * chunks for stage in range(stages)]
    cursor, clock = [0] * stages, [0.0] * stages
    forward = Op.F
    ranks = list(range(stages))
    left = sum(map(len, order))
    while left:
        before = left
        for rank in ranks:
            actions, at, now = order[rank], cursor[rank], clock[rank]
            size = len(actions)
            inputs = forward_in[rank], backward_in[rank]
            times = tables.forward_us[rank], backward[rank] if backward else []
            to_next = forward_in[rank + 1] if rank + 1 < stages else None
            to_previous = backward_in[rank - 1] if rank > 0 else None
            while at < size:
                op, _, c = actions[at]
                kind = 0 if op is forward else 1
                arrived = inputs[kind][c]
                if arrived is None:
                    break
                if arrived > now:
                    now = arrived
                now += times[kind][c]
                target = to_previous if kind else to_next
                if target is not None:
                    target[c] = now + message[c]
                at += 1
            left -= at - cursor[rank]
            cursor[rank], clock[rank] = at, now
        if left == before:
            stuck = [str(order[rank][at]) for rank, at in enumerate(cursor) if at < len(order[rank])]
            raise PlanError(f"the order deadlocks; the ranks that are not done wait at {', '.join(stuck)}")
        ranks.reverse()
    return max(clock)
