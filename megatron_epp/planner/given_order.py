"""Plans that keep the order of a table of whole sequences, for models in which something counts its forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.fit import is_within, least_peaks, peaks_bytes
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.patterns import by_laps, looped
from megatron_epp.planner.settings import orders_of
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.validation import validate


def in_given_order(chunks: tuple[Chunk, ...], problem: Problem, costs: Costs, options: Options, plain: bool) -> Decisions:
    """Order and recompute of a table of whole sequences such that every stage runs forwards and backwards in the table's order.

    A layer recomputes for all chunks or for none, so that what is kept of its forwards in a queue is taken by the right
    backward. Forward-only, ranks with several stages alternate as in Megatron's interleaved schedule. Of the options only
    `recompute` counts. `plain` means 1F1B, with no more chunks alive than in Megatron's schedules; else the fastest warm-up.

    Raises `InfeasibleError` if it does not fit the caps with all layers recomputed.
    """
    validate(problem, costs, options)
    tables, needed_bytes, best_us = tabulate(chunks, problem, costs), math.inf, math.inf
    best: Decisions | None = None
    for order in _orders(chunks, tables, problem, options, plain):
        recompute_steps = _uniform(order, tables, problem, options)
        if recompute_steps is None:
            needed_bytes = min(needed_bytes, max(least_peaks(order, tables)))
        elif (took_us := makespan_us(order, tables, recompute_steps)) < best_us:
            best, best_us = Decisions(chunks, order, recompute_steps), took_us
    if best is None:
        raise infeasible(problem, costs, options, int(needed_bytes))
    return best


def _orders(chunks: Sequence[Chunk], tables: Tables, problem: Problem, options: Options, plain: bool) -> Iterator[Order]:
    own = looped(problem)
    if problem.forward_only and problem.placement == own.rank_of:
        laps = by_laps(range(len(chunks)), own.num_ranks, range(own.num_chunks))
        yield tuple(tuple(Action(Op.F, own.stages(rank)[lap], chunk) for lap, chunk in laps) for rank in range(own.num_ranks))
        return
    rules = orders_of(problem, options).of_table
    for rule in rules[:1] if plain else rules:
        yield rule.order(chunks, tables, problem)


def _uniform(order: Order, tables: Tables, problem: Problem, options: Options) -> RecomputeSteps | None:
    """Return the fewest layers of each stage that recompute for all chunks, ``[stage][chunk]``; None if none fit the caps.

    Of a rank's stages the one that recomputes the smallest share of its layers is the next to recompute one more.
    """
    layers = [0 if problem.forward_only else count for count in tables.num_layers]
    is_fixed = options.recompute != "auto"
    counts = [min(int(options.recompute), count) if is_fixed else 0 for count in layers]
    while True:
        recompute_steps = [[count] * tables.num_chunks for count in counts]
        peaks = peaks_bytes(order, tables, recompute_steps)
        if is_within(peaks, problem.cap_bytes):
            return recompute_steps
        for rank, (peak, cap) in enumerate(zip(peaks, problem.cap_bytes, strict=True)):
            if peak <= cap:
                continue
            left = [stage for stage in tables.stages_of[rank] if counts[stage] < layers[stage]]
            if not left or is_fixed:
                return None
            counts[min(left, key=lambda stage: (counts[stage] / layers[stage], stage))] += 1
