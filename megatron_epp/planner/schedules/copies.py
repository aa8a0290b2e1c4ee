"""Copies to the host as a schedule wants them, required by a cap or not, and recompute for what is then above a cap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Op
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import Played, RecomputeSteps, play
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.copy_slots import Busy, Chooser
from megatron_epp.planner.memory.offload import Offload, away_bytes, peaks_with_copies, timed
from megatron_epp.planner.memory.recompute import by_stage, fit_with_copies, held_bytes
from megatron_epp.planner.orders.warm_up import Order, without_weights
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.fitted import fitted
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.tabulate import tabulate

Shares = Sequence[Sequence[float]]
"""Shares of the kept bytes that are to be copied away, ``[stage][chunk]``."""
ROUNDS = 6
"""Times that recompute is chosen again with lower caps, because copies come later than they were meant to."""


def copied(
    wanted: Callable[[Tables], Shares],
    order: Order,
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    options: Options,
) -> Decisions:
    """Copy shares of activations, each as soon as it can go and back as late as possible, where the link has time for both.

    Where these copies and recompute do not fit the caps, recompute alone is tried, then what `fitted` chooses. Without
    `Options.offload` or a link it chooses at once.

    Args:
        wanted: returns the shares from the times and sizes of the chunks.
        order, chunks, problem, costs, options: as for `fitted`.

    Raises:
        InfeasibleError, PlanError: as `fitted`.
    """
    if options.offload and options.recompute == "auto" and not problem.forward_only and math.isfinite(costs.host_us(1)):
        tables = tabulate(chunks, problem, costs, options.modes(costs))
        made = _within_caps(order, tables, problem, wanted(tables))
        if made is not None:
            steps, shares, copies = made.recompute_steps, made.shares, made.copies
            return Decisions(tuple(chunks), order, steps, options.modes(costs), copies=copies, offload=shares)
        with suppress(InfeasibleError):
            return fitted(order, chunks, problem, costs, replace(options, offload=False))
    return fitted(order, chunks, problem, costs, options)


def _within_caps(order: Order, tables: Tables, problem: Problem, wanted: Shares) -> Offload | None:
    """Choose copies, and recompute of chunks that stay where ranks are above their caps; None if that does not suffice."""
    codes, aims = encode(without_weights(order), len(tables.message_us)), problem.cap_bytes
    most = by_stage(tables.columns.most, len(tables.message_us))
    steps: RecomputeSteps = [[0] * len(tables.message_us) for _ in tables.rank_of]
    for _ in range(ROUNDS):
        made = _in_time(order, tables, steps, wanted)
        played = play(order, tables, steps, timed(made, tables))
        peaks = peaks_with_copies(order, tables, made, played)
        above = [max(0, peak - cap) for peak, cap in zip(peaks, problem.cap_bytes, strict=True)]
        if not any(above):
            return made if max(made.most_away(tables)) <= problem.host_cap_bytes else None
        aims = tuple(aim - more for aim, more in zip(aims, above, strict=True)) if any(map(any, steps)) else aims
        steps = [*map(list, steps)]
        for rank, away in enumerate(away_bytes(tables, made, played)):
            caps = [aims[rank] + moved for action, moved in zip(order[rank], away, strict=True) if action.op is not Op.W]
            if not fit_with_copies(codes, tables, rank, caps, most, steps):
                return None
    return None


def _in_time(order: Order, tables: Tables, steps: RecomputeSteps, wanted: Shares) -> Offload:
    """Copy the chunks for which the link has time, in the order in which their forwards end.

    Args:
        order: the actions of every rank.
        tables: times and sizes.
        steps: recompute ``[stage][chunk]``.
        wanted: the shares.
    """
    played = play(order, tables, steps)
    choosers = _choosers(order, tables, steps, played)
    forwards = [
        (played.end_us[rank][position], rank, position, action)
        for rank, row in enumerate(order)
        for position, action in enumerate(row)
        if action.op is Op.F
    ]
    shares = [[0.0] * len(tables.message_us) for _ in tables.rank_of]
    for _, rank, position, action in sorted(forwards):
        _, stage, c = action
        share = min(wanted[stage][c], tables.offloadable_share)
        needed_us = played.start_us[rank][choosers[rank].leaves[stage, c]]
        if int(share * tables.kept_bytes(stage, c, steps[stage][c])) and choosers[rank].take(
            action, position, share, needed_us, 0.0
        ):
            shares[stage][c] = share
    copies = tuple(chooser.copies for chooser in choosers)
    return Offload(steps, tuple(map(tuple, shares)), copies)


def _choosers(order: Order, tables: Tables, steps: RecomputeSteps, played: Played) -> list[Chooser]:
    """Return a chooser for every rank; those with a link in common share its times."""
    links = {link: (Busy(), Busy()) for link in tables.host_links}
    shared, held = len(links) < len(order), held_bytes(order, tables, steps)
    return [
        Chooser(row, tables, steps, held[rank], played.of(rank), links[tables.host_links[rank]], shared)
        for rank, row in enumerate(order)
    ]
