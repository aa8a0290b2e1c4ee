"""Recompute and copies for an order, and the best order of chunks: builders of schedules need not count memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.features import plan_targets
from megatron_epp.plan import Chunk, Op
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import RecomputeFit, by_stage, fit_recompute, fit_with_copies, held_bytes, peaks_of
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.kernels.live_bytes import leaves_bytes
from megatron_epp.planner.least import every_order
from megatron_epp.planner.memory.offload import Copied
from megatron_epp.planner.mistakes import refuse_mistakes, refuse_table
from megatron_epp.planner.order import Order, without_weights
from megatron_epp.planner.orders.completion import with_added
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import decisions_of
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.validation import validate

ROUNDS = 8
"""Times that recompute or copies are chosen again with a lower aim, because of what waits for weight gradients. With
4 or 16 no plan of 24 differs.
"""


def fitted(
    order: Order,
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options = Options(),  # noqa: B008 - frozen
    kind: Callable[..., Decisions] = Decisions,
) -> Decisions:
    """Choose how much recomputes, and with `options.offload` what is copied to the host, so that an order fits the memory caps.

    As little time is spent on it as a greedy rule finds. Where weight gradients are actions of their own (W), what their
    backwards keep for them counts. Keys and values stay on the device.

    Args:
        order: the actions of every rank: F and, unless `problem.forward_only`, B of every stage and chunk, with or without W.
        options: `recompute`, `recompute_modes` and `offload` are respected; the order is not changed.
        kind: makes the decisions from the fields of `Decisions`. Where actions share bytes (`Decisions.sharing`), nothing is
            offloaded.

    Raises `InfeasibleError` with the cap that would do if the order fits in no way, and `PlanError`, with the report of
    `check`, if the arguments make no sense, the order deadlocks, or actions or tokens are missing, unknown or doubled.
    """
    validate(problem, costs, options)
    planner = "fitted" if options.planner == "greedy" else options.planner
    decisions = kind(tuple(chunks), order, [[0] * len(chunks)] * problem.num_stages, options.modes(costs.recompute_modes))
    refuse_mistakes(decisions, problem, costs, planner)
    tables = decisions.tables(problem, costs)
    leaves = partial(leaves_bytes, tables.columns)
    order = tuple(tuple(a for a in row if a.op is not Op.W or leaves(a.stage * len(chunks) + a.chunk)) for row in order)
    decisions = replace(decisions, order=order)
    whole = without_weights(order)
    fit = _fit(decisions, whole, tables, problem.cap_bytes, options)
    best_us, recompute_steps = math.inf, fit.recompute_steps
    if recompute_steps is not None:
        best_us = makespan_us(with_added(order, tables, recompute_steps), tables, recompute_steps)
    copied: Copied | None = None
    may_offload = options.recompute == "auto" and not problem.forward_only and decisions.sharing is None
    if may_offload and math.isfinite(costs.host_us(1)):
        copied = next((copy(order, whole, tables, problem) for copy in plan_targets(problem, options, "fit")), None)
    if copied is not None and not copied.short_bytes and copied.makespan_us < best_us:
        (offload,) = copied.offloads
        return Decisions(
            decisions.chunks, order, offload.recompute_steps, decisions.modes, copies=offload.copies, offload=offload.shares
        )
    if recompute_steps is None:
        least_host = problem.host_cap_bytes + copied.short_bytes if copied is not None else 0
        raise infeasible(problem, costs, options, fit.needed_bytes, least_host, planner)
    return replace(decisions, recompute_steps=recompute_steps)


def for_table(chunks: tuple[Chunk, ...], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The best order, recompute and offload of activations found for a chunk table in forward order.

    What `options` says of slicing and packing is ignored. Raises `InfeasibleError` if nothing that was tried fits the caps, and
    `PlanError` if the arguments make no sense, or the chunks are no such table.
    """
    validate(problem, costs, options)
    refuse_table(Decisions(chunks, (), []), problem, costs, options.planner)
    return decisions_of(every_order(Replicas((problem,), costs, options), chunks))


def _fit(decisions: Decisions, whole: Order, tables: Tables, caps: Sequence[int], options: Options) -> RecomputeFit:
    """Fit recompute to the caps, with what waits for weight gradients and what actions hold at once.

    What the actions of a rank hold more than in the order `whole`, with whole backwards that run one by one, is taken off its
    cap, action by action, and recompute fitted to what is left. It changes a little with that, so this is repeated.
    """
    order, sharing = decisions.order, decisions.sharing
    if sharing is None and not any(action.op is Op.W for row in order for action in row):
        return fit_recompute(order, tables, caps, options)
    most = by_stage(tables.columns.most, tables.columns.num_chunks)
    is_fixed = options.recompute != "auto"
    recompute_steps = [[min(int(options.recompute), top) if is_fixed else 0 for top in row] for row in most]
    codes = encode(whole, tables.columns.num_chunks)
    at = [[position for position, action in enumerate(row) if action.op is not Op.W] for row in order]
    more = [np.zeros(len(row), dtype=np.int64) for row in whole]
    for left in reversed(range(ROUNDS)):
        held = held_bytes(order, tables, recompute_steps, sharing)
        above = [rank for rank, cap in enumerate(caps) if held[rank].max(initial=0) > cap]
        if not above or is_fixed:
            break
        without = held_bytes(whole, tables, recompute_steps)
        for rank in above:
            more[rank] = np.maximum(more[rank], held[rank][at[rank]] - without[rank])
            allowed = (caps[rank] - more[rank]).tolist()
            if not left or not fit_with_copies(codes, tables, rank, allowed, most, recompute_steps):
                for stage in tables.stages_of[rank]:
                    recompute_steps[stage] = most[stage]
    return RecomputeFit.of(recompute_steps, peaks_of(held_bytes(order, tables, recompute_steps, sharing)), caps)
