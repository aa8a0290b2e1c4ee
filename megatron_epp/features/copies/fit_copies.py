"""Choice of the activations that go to the host between forward and backward, and the recompute that remains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_epp.features.copies.copy_slots import choose
from megatron_epp.plan import Action, Op
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.evaluate import Played, RecomputeSteps, play
from megatron_epp.planner.fit import (
    by_stage,
    fit_lockstep,
    fit_with_copies,
    held_bytes,
    is_within,
    least_peaks,
    peaks_bytes,
    peaks_of,
)
from megatron_epp.planner.kernels.codes import Codes, encode
from megatron_epp.planner.memory.offload import Copied, Integers, Offload, peaks_with_copies, timed
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.completion import with_added
from megatron_epp.planner.tables import Tables

EXCESS_SHARES = (1.0, 0.7, 0.4, 0.1, 0.0)
"""Shares of the excess over the cap left to the link, tried in turn; the rest recomputes. With three no plan of 24 differs."""
MOST_START_RATIO = 1.02
"""Recompute that copies may spare again is worth a try when it alone is slower than the best by less than this."""
ROUNDS = 3
"""Times the copies are chosen again with a lower aim. With 1 or 6 no plan of 24 differs."""


ROUNDS_OF_ORDER = 8
"""Times that copies are chosen again with a lower aim, because of what waits for weight gradients. With 4 or 16 no plan of 24
differs.
"""


def fit_offload(
    order: Order, tables: Sequence[Tables], caps: tuple[int, ...], host_room: Sequence[Sequence[int]]
) -> Copied | None:
    """Copy as much as the link has time for and recompute the rest of the excess over the cap.

    How much of that is left to the link is tried from all of it downwards: recompute is fitted to a cap that is higher by that
    share, copies are chosen in the times that follow, and played. What is then above the cap (copies that end late) lowers the
    aim for the next round. Returns the fastest for which there is `host_room`, ``[replica][rank]``; else the one that lacks
    least, or None where no copies meet the caps.

    Lockstep replicas, with equal times (`replicas.slowest_times`), have the same recompute, and each copies what it has to, but
    only so that no load keeps an action waiting, which would keep all replicas waiting.
    """
    best: Copied | None = None
    lacking: Copied | None = None
    codes = encode(order, tables[0].num_chunks)
    if not all(is_within(floors(order, codes, own), caps) for own in tables):
        return None
    none = [[0] * tables[0].num_chunks] * len(tables[0].rank_of)
    bounds = [(least_peaks(codes, own), peaks_bytes(codes, own, none)) for own in tables]
    for share in EXCESS_SHARES:
        eased = [
            [max(low, cap + max(0, int(share * (high - cap)))) for cap, low, high in zip(caps, *bound, strict=True)]
            for bound in bounds
        ]
        recompute_steps = fit_lockstep(codes, tables, eased, Options()).recompute_steps
        assert recompute_steps is not None  # no cap is below the least peak
        copied = _fit_copies(order, codes, tables, caps, recompute_steps, None if best is None else best.makespan_us, host_room)
        if copied is not None and copied.short_bytes:
            lacking = copied if lacking is None or copied.short_bytes < lacking.short_bytes else lacking
        elif copied is not None and (best is None or copied.makespan_us < best.makespan_us):
            best = copied
        elif best is not None:
            break
    return best or lacking


def floors(order: Order, codes: Codes, tables: Tables) -> list[int]:
    """Compute the least bytes of every rank in some forward, if all layers recompute and all that other chunks keep is away. A
    backward may hold a little less where not all layers recompute (see `least_peaks`).
    """
    most, by_rank = by_stage(tables.columns.most, tables.columns.num_chunks), []
    for actions, live in zip(order, held_bytes(codes, tables, most), strict=True):
        entered: dict[tuple[int, int], int] = {}
        change = np.zeros(len(actions) + 1, dtype=np.int64)
        for position, (op, stage, c) in enumerate(actions):
            if op is Op.F:
                entered[stage, c] = position
            elif op is Op.B:
                kept_bytes = tables.kept_bytes(stage, c, most[stage][c])
                change[entered[stage, c] + 1] += kept_bytes
                change[position] -= kept_bytes
        floor = live - np.cumsum(change)[:-1]
        by_rank.append(int(floor[list(entered.values())].max()))
    return by_rank


def _fit_copies(
    order: Order,
    codes: Codes,
    tables: Sequence[Tables],
    caps: tuple[int, ...],
    recompute_steps: RecomputeSteps,
    limit_us: float | None,
    host_room: Sequence[Sequence[int]],
) -> Copied | None:
    """Choose copies for a given recompute, then as much less or more recompute as the memory that they free asks for.

    Each round aims below the cap by as much as the last came out above it. None where no copies are chosen, the caps are not
    met after `ROUNDS`, or the start is slower by `MOST_START_RATIO` than `limit_us`, the best makespan so far.
    """
    played = play(codes, tables[0], recompute_steps)
    if limit_us is not None and played.makespan_us >= limit_us * MOST_START_RATIO:
        return None
    aims = [list(caps) for _ in tables]
    held = [held_bytes(codes, own, recompute_steps) for own in tables]
    for _ in range(ROUNDS):
        chosen = []
        for own, live, aim in zip(tables, held, aims, strict=True):
            if (offload := _chosen(order, codes, own, live, aim, recompute_steps, played)) is None:
                return None
            chosen.append(offload)
        if not any(any(offload.copies) for offload in chosen):
            return None
        most_steps = _most_recompute(recompute_steps, [offload.recompute_steps for offload in chosen])
        offloads = tuple(replace(offload, recompute_steps=most_steps) for offload in chosen)
        after = [play(codes, own, most_steps, timed(offload, own)) for own, offload in zip(tables, offloads, strict=True)]
        if any(played.start_us != after[0].start_us for played in after):
            return None
        above = [
            [peak - cap for peak, cap in zip(peaks_with_copies(codes, own, offload, times), caps, strict=True)]
            for own, offload, times in zip(tables, offloads, after, strict=True)
        ]
        if max(map(max, above)) <= 0:
            away = [offload.most_away(own) for offload, own in zip(offloads, tables, strict=True)]
            short = max(most - room for rows in zip(away, host_room, strict=True) for most, room in zip(*rows, strict=True))
            return Copied(after[0].makespan_us, offloads, max(0, short))
        aims = [[aim - max(0, over) for aim, over in zip(*rows, strict=True)] for rows in zip(aims, above, strict=True)]
    return None


def _chosen(
    order: Order,
    codes: Codes,
    tables: Tables,
    held: Sequence[Integers],
    aims: list[int],
    recompute_steps: RecomputeSteps,
    played: Played,
) -> Offload | None:
    """Choose the copies of one replica and the recompute that remains; None as soon as a rank is above its aim with both.
    `held` are bytes live while each action runs, ``[rank][position]``; `played` has times without copies.
    """
    shares = [[0.0] * tables.num_chunks for _ in tables.rank_of]
    most = by_stage(tables.columns.most, tables.num_chunks)
    fitted = [[0] * tables.num_chunks for _ in tables.rank_of]
    copies: list[tuple[tuple[Action, Action | None], ...]] = [()] * len(order)
    excess = [live - aim for live, aim in zip(held, aims, strict=True)]
    for choosers in choose(order, tables, excess, recompute_steps, played):
        for rank, chooser in choosers:
            for (_, stage, c), share in ((copy.action, copy.share) for copy in chooser.chosen):
                shares[stage][c], most[stage][c] = share, recompute_steps[stage][c]
            copies[rank] = chooser.copies
            if not fit_with_copies(codes, tables, rank, (aims[rank] + chooser.away).tolist(), most, fitted):
                return None
    return Offload(fitted, tuple(map(tuple, shares)), tuple(copies))


def _most_recompute(recompute_steps: RecomputeSteps, fitted: Sequence[RecomputeSteps]) -> RecomputeSteps:
    """Combine the recompute of all replicas ``[stage][chunk]``: the maximum. Of several it is no less than what the times were
    planned with, so no load comes late because an action ends sooner.
    """
    return fitted[0] if len(fitted) == 1 else np.max([recompute_steps, *fitted], axis=0).tolist()


def copied_to_fit(order: Order, whole: Order, tables: Tables, problem: Problem) -> Copied | None:
    """Choose copies for whole backwards so that the order itself, with what waits and with its own times, is under the caps.

    Whole backwards are held to the caps, and to lower ones that relieve a rank of as much as the order is above its cap.
    Returns the faster of both; what lacks room in host memory only if none has any.
    """
    caps = problem.cap_bytes
    none = [[0] * tables.columns.num_chunks] * tables.columns.num_stages
    most, own = (peaks_of(held_bytes(actions, tables, none)) for actions in (order, whole))
    relieved = tuple(less - (peak - cap) if peak > cap else cap for peak, less, cap in zip(most, own, caps, strict=True))
    copied = [result for aims in dict.fromkeys((caps, relieved)) if (result := _copied_to(aims, order, whole, tables, problem))]
    return min(copied, key=lambda result: (result.short_bytes, result.makespan_us), default=None)


def _copied_to(aims: Sequence[int], order: Order, whole: Order, tables: Tables, problem: Problem) -> Copied | None:
    """Hold whole backwards to ever lower aims, bytes by rank, until the order is under the caps; None if no copies do that."""
    room = [[problem.host_cap_bytes] * problem.num_ranks]
    for _ in range(ROUNDS_OF_ORDER):
        copied = fit_offload(whole, (tables,), tuple(aims), room)
        if copied is None or copied.short_bytes:
            return copied
        (offload,) = copied.offloads
        complete = with_added(order, tables, offload.recompute_steps)
        played = play(complete, tables, offload.recompute_steps, timed(offload, tables))
        peaks = peaks_with_copies(complete, tables, offload, played)
        above = [peak - cap for peak, cap in zip(peaks, problem.cap_bytes, strict=True)]
        if max(above) <= 0:
            return copied._replace(makespan_us=played.makespan_us)
        aims = [aim - max(0, over) for aim, over in zip(aims, above, strict=True)]
    return None
