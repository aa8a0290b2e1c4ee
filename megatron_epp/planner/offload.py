"""Offload: which chunks' activations go to the host between forward and backward, when, and what is recomputed besides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_epp.planner.copies import choose
from megatron_epp.planner.evaluate import Layers, Played, moved_bytes, play
from megatron_epp.planner.inner.columns import Codes, encode
from megatron_epp.planner.memory import by_stage, fit_beside, fit_recompute, least_peaks, levels, peaks_bytes
from megatron_epp.planner.order import CopyOrder, Order
from megatron_epp.planner.problem import Options
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op

SHARES = (1.0, 0.7, 0.4, 0.1)
"""Of what is above the cap, what the link is to take. The rest is recomputed."""
SLOWER = 1.02
"""Recompute that copies may spare again is worth a try when it alone is slower than the best by less than this."""
ROUNDS = 3
"""Times the copies are chosen again with a lower aim."""


@dataclass(frozen=True, slots=True)
class Offload:
    """What fits the caps.

    Attributes:
        layers: recompute ``[stage][chunk]``.
        shares: of the kept bytes that are copied away, ``[stage][chunk]``.
        copies: the offloads and loads of every rank, in order.
        makespan_us: of it all.
    """

    layers: Layers
    shares: tuple[tuple[float, ...], ...]
    copies: CopyOrder
    makespan_us: float


def fit_offload(order: Order, tables: Tables, caps: tuple[int, ...]) -> Offload | None:
    """Copy away what the link has time for, recompute what is then still above the cap.

    How much of the excess over the cap is left to the link is tried from all of it downwards: recompute is fitted to a cap
    that is higher by that share, copies are chosen in the times that follow, and played. What is then above the cap (copies
    that end later than they were meant to) lowers the aim for the next round. The fastest that fits is returned.

    Returns:
        None where no copies fit.
    """
    best: Offload | None = None
    codes = encode(order, len(tables.message_us))
    least = least_peaks(codes, tables)
    peaks = peaks_bytes(codes, tables, [[0] * len(tables.message_us)] * len(tables.rank_of))
    for share in SHARES:
        eased = tuple(
            max(low, cap + max(0, int(share * (high - cap)))) for cap, low, high in zip(caps, least, peaks, strict=True)
        )
        layers = _recompute(codes, tables, eased)
        found = _fit_copies(order, tables, caps, layers, None if best is None else best.makespan_us)
        if found is not None and (best is None or found.makespan_us < best.makespan_us):
            best = found
        elif best is not None:
            break
    return best


def _recompute(codes: Codes, tables: Tables, caps: tuple[int, ...]) -> Layers:
    layers = fit_recompute(codes, tables, caps, Options()).layers
    assert layers is not None  # no cap is below the least peak
    return layers


def _fit_copies(order: Order, tables: Tables, caps: tuple[int, ...], layers: Layers, limit_us: float | None) -> Offload | None:
    """Copies for a given recompute, and then as much less or more of that as the memory they make asks for.

    Each round aims below the cap by as much as the last came out above it.
    """
    codes = encode(order, len(tables.message_us))
    played = play(order, tables, layers)
    if limit_us is not None and played.makespan_us >= limit_us * SLOWER:
        return None
    aims = list(caps)
    for _ in range(ROUNDS):
        shares = [[0.0] * len(tables.message_us) for _ in tables.rank_of]
        most = by_stage(tables.columns.most, len(tables.message_us))
        copies: list[tuple[tuple[Action, Action | None], ...]] = []
        room: list[int] = []
        for aim, chooser in zip(aims, choose(order, tables, aims, layers, played), strict=True):
            for (_, stage, c), share in ((copy.action, copy.share) for copy in chooser.chosen):
                shares[stage][c], most[stage][c] = share, layers[stage][c]
            copies.append(tuple((copy.action, copy.after) for copy in chooser.chosen))
            room += [aim + away for away in chooser.away.tolist()]
        fitted = fit_beside(codes, tables, room, most) if any(copies) else None
        if fitted is None:
            return None
        after = play(order, tables, fitted, timed(copies, shares, tables, fitted))
        above = []
        for rank, row in enumerate(copies):
            sizes = [(a, moved_bytes(tables, fitted, a.stage, a.chunk, shares[a.stage][a.chunk])) for a, _ in row]
            above.append(_peak(order[rank], tables, rank, fitted, sizes, after) - caps[rank])
        if max(above) <= 0:
            return Offload(fitted, tuple(map(tuple, shares)), tuple(copies), after.makespan_us)
        aims = [aim - max(0, over) for aim, over in zip(aims, above, strict=True)]
    return None


def timed(
    copies: CopyOrder | list[tuple[tuple[Action, Action | None], ...]],
    shares: tuple[tuple[float, ...], ...] | list[list[float]],
    tables: Tables,
    layers: Layers,
) -> list[list[tuple[Action, float, Action | None]]]:
    """Copies with the time that each takes, as `play` wants them."""

    def took_us(action: Action) -> float:
        _, stage, c = action
        return tables.host_us(moved_bytes(tables, layers, stage, c, shares[stage][c]))

    return [[(action, took_us(action), after) for action, after in row] for row in copies]


def _peak(
    actions: tuple[Action, ...], tables: Tables, rank: int, layers: Layers, copies: list[tuple[Action, int]], played: Played
) -> int:
    """Most bytes live at a time. At equal times loads come first and offloads last, so it is never too low."""
    takes, gives = levels(actions, tables, layers)
    compute = np.ravel(np.column_stack((takes, np.negative(gives))))
    times = np.ravel(np.column_stack((played.start_us[rank], played.end_us[rank])))
    sizes = np.array([size for _, size in copies], dtype=np.int64)
    loads = np.array([action.op is Op.L for action, _ in copies], dtype=np.bool_)
    begins, ends = np.array(played.copy_start_us[rank]), np.array(played.copy_end_us[rank])
    when = np.concatenate((begins[loads], times, ends[~loads]))
    delta = np.concatenate((sizes[loads], compute, -sizes[~loads]))
    return int(tables.static[rank] + np.cumsum(delta[np.argsort(when, kind="stable")]).max())
