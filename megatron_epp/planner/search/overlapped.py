"""Backwards joined with the forwards behind them into steps of two actions, whose exchanges are overlapped with compute.

In such a step each action computes while the other exchanges activations between tensor-parallel ranks. STP (2510.27257) builds
an order around them; here they are made of neighbours in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_epp.cost import Costs
from megatron_epp.plan import Action, Chunk, InfeasibleError, Op, PlanError
from megatron_epp.planner.assemble import predicted_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.orders.joined import Joined
from megatron_epp.planner.orders.vocabulary import has_shards, with_shards
from megatron_epp.planner.orders.warm_up import Order, without_weights
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.fitted import fitted
from megatron_epp.planner.tables import Tables


def overlapped(found: Sequence[Decisions], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Join backwards with the forwards behind them where that is faster.

    Both actions of a step hold their memory at once, so recompute is fitted to the caps again. Decisions with copies or KV
    offload stay as they are, and so do all where stages exchange nothing.

    Args:
        found: decisions that fit the caps, the fastest first.
        problem, costs, options: as for `plan`.

    Returns:
        The fastest, which may be the first of `found`.
    """
    best, best_us = found[0], predicted_us(found[0], problem, costs)
    seen: set[tuple[tuple[Chunk, ...], Order, Joined]] = set()
    for made in found:
        tables = made.tables(problem, costs)
        if problem.forward_only or any(made.copies) or made.kv_offload or not any(map(any, tables.exchange_us)):
            continue
        for order, joined in _choices(made, tables):
            if (made.chunks, order, joined) in seen:
                continue
            seen.add((made.chunks, order, joined))
            try:
                tried = fitted(order, made.chunks, problem, costs, options, joined)
                if has_shards(tables):
                    rows = with_shards(tried.order, tables, tried.recompute_steps)
                    tried = replace(tried, order=tuple(tuple(_together(row, joined)) for row in rows))
                took_us = predicted_us(tried, problem, costs)
            except (InfeasibleError, PlanError):  # no room for two actions at once, or a deadlock
                continue
            if took_us < best_us:
                best, best_us = tried, took_us
    return best


def _together(row: Sequence[Action], joined: Joined) -> Iterator[Action]:
    """Yield the actions of a rank with both of a pair next to each other: what stood between them comes behind."""
    follows, second = dict(joined), None
    waiting: list[Action] = []
    for action in row:
        if second is not None and action != second:
            waiting.append(action)
            continue
        yield action
        yield from waiting
        waiting.clear()
        second = follows.get(action)


def _choices(made: Decisions, tables: Tables) -> Iterator[tuple[Order, Joined]]:
    """Yield the order with weight gradients of their own in the cool-down and with none, each with pairs to join.

    Elsewhere they would stand between backwards and forwards. The pairs are all of these, or those that wait for nothing: a
    step begins when the inputs of both are there, and a backward that waits for its forward's holds up the ranks before it.
    """
    split = tuple(tuple(action for action in row if action.op in (Op.F, Op.B, Op.W)) for row in made.order)
    for order in dict.fromkeys((tuple(map(_split_in_cool_down, split)), without_weights(split))):
        pairs = frozenset(pair for row in order for pair in pairwise(row) if pair[0].op is Op.B and pair[1].op is Op.F)
        yield order, pairs
        played = play(order, tables, made.recompute_steps)
        times = (zip(*row, strict=True) for row in zip(order, played.start_us, played.end_us, strict=True))
        at_us = {action: (start_us, end_us) for row in times for action, start_us, end_us in row}
        yield order, frozenset(pair for pair in pairs if _sent_us(pair[1], at_us) <= at_us[pair[0]][0])


def _split_in_cool_down(row: Sequence[Action]) -> tuple[Action, ...]:
    """Leave out the weight gradients of backwards before a rank's last forward."""
    last = max(at for at, action in enumerate(row) if action.op is Op.F)
    whole = {action[1:] for action in row[:last] if action.op is Op.B}
    return tuple(action for action in row if action.op is not Op.W or action[1:] not in whole)


def _sent_us(forward: Action, at_us: dict[Action, tuple[float, float]]) -> float:
    """Return when the stage before has ended a forward, in microseconds."""
    return at_us[forward._replace(stage=forward.stage - 1)][1] if forward.stage else 0.0
