"""Neighbouring actions joined into steps of two, whose exchanges are overlapped with compute.

In such a step each action computes while the other exchanges activations between tensor-parallel ranks. STP (2510.27257) builds
an order around them; here they are made of neighbours in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from megatron_epp.contrib.overlap.joined import Joined, JoinedDecisions
from megatron_epp.cost.model import Costs
from megatron_epp.features.split_weights.split import WHOLE_GAP
from megatron_epp.features.split_weights.split_orders import split_weights
from megatron_epp.plan import Action, Chunk, InfeasibleError, Op, PlanError
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.candidates import Candidate, Candidates
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.kernels.codes import CodedOrder, encode
from megatron_epp.planner.order import Order, slice_groups, without_weights
from megatron_epp.planner.orders.completion import has_added, peaks, with_added
from megatron_epp.planner.tables import Tables

BACKWARD_FIRST = ((Op.B, Op.F),)
"""Kinds of neighbours that are joined: the two with most to exchange, and with most to compute in the meantime."""
WITH_WEIGHTS = (*BACKWARD_FIRST, (Op.F, Op.W), (Op.W, Op.F))
"""The same, and weight gradients, during which a forward exchanges."""
WITH_FORWARDS = (*BACKWARD_FIRST, (Op.F, Op.B), (Op.F, Op.F))
"""The same, and further forwards, in a warm-up too."""


FINISHED_CANDIDATES = 8
"""Candidates, the fastest, of which some are joined."""


def finish(candidates: Candidates, best: Candidate) -> Candidate:
    """Join actions of the fastest candidates where that is faster."""
    # `overlapped` makes its own tables: without the room that messages needed before, its plan would lack it again.
    problem = candidates.replicas.with_room(candidates.room_of(best)).problems[0]
    fastest = [best, *(candidate for candidate in candidates.fitting()[:FINISHED_CANDIDATES] if candidate is not best)]
    decisions = [candidate.decisions[0] for candidate in fastest]
    return replace(best, decisions=(overlapped(decisions, problem, candidates.replicas.costs, candidates.options),))


def overlapped(ranked: Sequence[Decisions], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Join neighbouring actions where that is faster.

    Both actions of a step hold their memory at once, so recompute is fitted to the caps again. Decisions with copies or KV
    offload stay as they are, and so do all where stages exchange nothing.
    """
    best, best_us = ranked[0], ranked[0].makespan_us(problem, costs)
    seen: set[tuple[tuple[Chunk, ...], Order, Joined]] = set()
    for decisions in ranked:
        tables = decisions.tables(problem, costs)
        exchanges = any(own.exchange_us.any() for own in tables.passes)
        if problem.forward_only or any(decisions.copies) or decisions.kv_offload or not exchanges:
            continue
        for order, joined in _choices(decisions, tables):
            if (decisions.chunks, order, joined) in seen:
                continue
            seen.add((decisions.chunks, order, joined))
            try:
                tried = fitted(order, decisions.chunks, problem, costs, options, partial(JoinedDecisions, joined=joined))
                if has_added(tables):
                    rows = with_added(tried.order, tables, tried.recompute_steps)
                    tried = replace(tried, order=tuple(tuple(_together(row, joined)) for row in rows))
                took_us = tried.makespan_us(problem, costs)
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


def _choices(decisions: Decisions, tables: Tables) -> Iterator[tuple[Order, Joined]]:
    """Yield orders, each with pairs to join.

    Backwards are joined with the forwards behind them where weight gradients have actions of their own in the cool-down
    only or not at all, for elsewhere they would stand between the two. In the order as it is, weight gradients are joined with
    forwards too, or forwards with backwards and with forwards. Either all of these pairs are joined, or only pairs that wait
    for nothing: a step begins when the inputs of both actions are there, so an action that waits for the other's inputs holds
    up ranks that need it.
    """
    group_of = {c: number for number, group in enumerate(slice_groups(decisions.chunks)) for c in group}
    split = tuple(tuple(action for action in row if action.op in (Op.F, Op.B, Op.W)) for row in decisions.order)
    whole = without_weights(split)
    splits = [split]
    if whole != split:  # within the memory of whole backwards fewer gradients stand between backwards and forwards
        codes = encode(whole, len(decisions.chunks))
        least = peaks(codes, tables, decisions.as_offload)
        early = split_weights(codes, tables, decisions.recompute_steps, least, (), WHOLE_GAP)
        splits.append(tuple(map(tuple, CodedOrder(early, len(decisions.chunks)))))
    for order in dict.fromkeys((*(tuple(map(_split_in_cool_down, variant)) for variant in splits), whole, *splits)):
        waits = _waiting(order, decisions, tables)
        pairs = _pairs(order, WITH_WEIGHTS if order in splits else BACKWARD_FIRST)
        yield order, pairs
        yield order, frozenset(pair for pair in pairs if not waits(pair))
        if order in splits:
            free = (pair for pair in _pairs(order, WITH_FORWARDS) if group_of[pair[0].chunk] != group_of[pair[1].chunk])
            yield order, frozenset(pair for pair in free if not waits(pair))


def _pairs(order: Order, kinds: Collection[tuple[Op, Op]]) -> Joined:
    """Return neighbours of certain kinds, from the start of every rank on; an action is in one pair at most."""
    pairs: set[tuple[Action, Action]] = set()
    for row in order:
        last: Action | None = None
        for first, second in pairwise(row):
            if first != last and (first.op, second.op) in kinds:
                pairs.add((first, second))
                last = second
    return frozenset(pairs)


def _waiting(order: Order, decisions: Decisions, tables: Tables) -> Callable[[tuple[Action, Action]], bool]:
    """Return a function: does a pair's second action lack its input when the first starts, where no actions are joined?"""
    played = play(order, tables, decisions.recompute_steps)
    rows = (zip(*row, strict=True) for row in zip(order, played.start_us, played.end_us, strict=True))
    at_us = {action: (start_us, end_us) for row in rows for action, start_us, end_us in row}
    return lambda pair: _sent_us(pair[1], at_us, tables) > at_us[pair[0]][0]


def _split_in_cool_down(row: Sequence[Action]) -> tuple[Action, ...]:
    """Leave out the weight gradients of backwards before a rank's last forward."""
    last = max(at for at, action in enumerate(row) if action.op is Op.F)
    whole = {action[1:] for action in row[:last] if action.op is Op.B}
    return tuple(action for action in row if action.op is not Op.W or action[1:] not in whole)


def _sent_us(action: Action, at_us: dict[Action, tuple[float, float]], tables: Tables) -> float:
    """Return when the action ends whose message another waits for, in microseconds; 0 where it waits for none."""
    if action.op is Op.F:
        return at_us[action._replace(stage=action.stage - 1)][1] if action.stage else 0.0
    if action.op is Op.B:
        is_last = action.stage == len(tables.rank_of) - 1
        return at_us[action._replace(op=Op.F) if is_last else action._replace(stage=action.stage + 1)][1]
    return 0.0
