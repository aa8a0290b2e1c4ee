"""Copies to the host as a schedule wants them, required by a cap or not, and recompute for what is then above a cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.features.copies.ahead import Shares, fit_ahead
from megatron_epp.plan import Chunk, InfeasibleError
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables, tabulate

Fitting = Callable[[Order, Sequence[Chunk], Problem, Costs, Options], Decisions]
"""Function that chooses recompute and copies for an order, as `fitted` does."""


def copied(
    wanted: Callable[[Tables], Shares],
    order: Order,
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options,
    *,
    limits: Callable[[Tables], Iterable[RecomputeSteps | None]] = lambda tables: (None,),
    otherwise: Fitting = fitted,
) -> Decisions:
    """Copy shares of activations ahead (`fit_ahead`).

    Where these copies and recompute do not fit the caps, recompute alone is tried, then what `otherwise` chooses. Without
    `Options.offload` or a link it chooses at once.

    Args:
        wanted: returns the shares from the times and sizes of the chunks.
        order, chunks, problem, costs, options: as `fitted` takes them.
        limits: returns what may recompute next to the copies, tried in turn (`fit_ahead`); by default all of a plan.
        otherwise: chooses where these copies do not do.

    Raises:
        InfeasibleError, PlanError: as `fitted`.
    """
    if options.offload and options.recompute == "auto" and not problem.forward_only and math.isfinite(costs.host_us(1)):
        tables = tabulate(chunks, problem, costs, options.modes(costs.recompute_modes))
        room = [problem.host_cap_bytes] * problem.num_ranks
        for limit in limits(tables):
            result = fit_ahead(order, tables, problem.cap_bytes, room, wanted(tables), limit=limit)
            if result is not None and not result.short_bytes:
                (offload,) = result.offloads
                steps, shares, copies = offload.recompute_steps, offload.shares, offload.copies
                return Decisions(
                    tuple(chunks), order, steps, options.modes(costs.recompute_modes), copies=copies, offload=shares
                )
        with suppress(InfeasibleError):
            return otherwise(order, chunks, problem, costs, replace(options, offload=False))
    return otherwise(order, chunks, problem, costs, options)
