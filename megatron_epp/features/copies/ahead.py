"""Copies of all that the links to the hosts have time for, required by a cap or not; then recompute, where ranks are above it.

They spare recompute wherever a link is free before it is needed (PipeOffload, 2503.01328, and SPPO, 2503.10377, copy so).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_epp.features.copies.copy_slots import Busy, Chooser
from megatron_epp.features.copies.fit_copies import floors
from megatron_epp.plan import Op
from megatron_epp.planner.evaluate import RecomputeSteps, play
from megatron_epp.planner.fit import by_stage, fit_with_copies, held_bytes, is_within
from megatron_epp.planner.kernels.codes import Codes, encode, encode_known
from megatron_epp.planner.memory.offload import Copied, Offload, away_bytes, peaks_with_copies, timed
from megatron_epp.planner.order import Order, without_weights
from megatron_epp.planner.tables import Tables

Shares = Sequence[Sequence[float]]
"""Shares of the kept bytes that are to be copied away, ``[stage][chunk]``."""
ROUNDS = 6
"""Times that recompute is chosen again with lower caps, because copies come later than they were meant to."""


def longest_lived_shares(tables: Tables) -> Shares:
    """Return 1 for the first stages of each rank, as many as are copied both ways while the rank computes, and 0 for others. If
    there is no time for one, its share is what there is time for.
    """
    shares: list[list[float]] = [[0.0] * tables.num_chunks for _ in tables.rank_of]
    for stages in tables.stages_of:
        rows = ((tables.passes[stage].forward_us, tables.passes[stage].backward_us) for stage in stages)
        left_us = sum(sum(forward_us.tolist()) + sum(backward_us.tolist()) for forward_us, backward_us in rows)
        for stage in stages:
            both_us = sum(2 * tables.host_us(tables.kept_bytes(stage, c, 0)) for c in range(tables.num_chunks))
            if both_us > left_us and stage != stages[0]:
                break
            shares[stage] = [min(1.0, left_us / both_us) if both_us > 0.0 else 0.0] * tables.num_chunks
            left_us -= both_us
    return shares


def fit_ahead(
    order: Order,
    tables: Tables,
    caps: Sequence[int],
    host_room: Sequence[int],
    wanted: Shares,
    limit_us: float = math.inf,
    limit: RecomputeSteps | None = None,
) -> Copied | None:
    """Copy shares of activations, each as soon as it can go and back as late as possible, where the link has time for both.

    Chunks that stay recompute, within `limit` steps, where ranks are above their caps. Returns None where that does not
    suffice, or takes longer than `limit_us`.
    """
    codes, aims = encode_known(order, tables.num_chunks), tuple(caps)
    backwards = without_weights(order) if any(action.op is Op.W for row in order for action in row) else order
    whole = codes if backwards is order else encode(backwards, tables.num_chunks)
    if not is_within(floors(backwards, whole, tables), caps):
        return None
    most = by_stage(tables.columns.most, tables.num_chunks) if limit is None else limit
    steps: RecomputeSteps = [[0] * tables.num_chunks for _ in tables.rank_of]
    for _ in range(ROUNDS):
        offload = _in_time(order, codes, tables, steps, wanted)
        played = play(codes, tables, steps, timed(offload, tables))
        if played.makespan_us >= limit_us:
            return None
        above = [max(0, peak - cap) for peak, cap in zip(peaks_with_copies(codes, tables, offload, played), caps, strict=True)]
        if not any(above):
            short = max(most - room for most, room in zip(offload.most_away(tables), host_room, strict=True))
            return Copied(played.makespan_us, (offload,), max(0, short))
        aims = tuple(aim - more for aim, more in zip(aims, above, strict=True)) if any(map(any, steps)) else aims
        steps = [*map(list, steps)]
        for rank, away in enumerate(away_bytes(tables, offload, played)):
            allowed = [aims[rank] + moved for action, moved in zip(order[rank], away, strict=True) if action.op is not Op.W]
            if not fit_with_copies(whole, tables, rank, allowed, most, steps):
                return None
    return None


def _in_time(order: Order, codes: Codes, tables: Tables, steps: RecomputeSteps, wanted: Shares) -> Offload:
    """Copy the chunks for which the link has time, in the order of their forwards' ends."""
    played, held = play(codes, tables, steps), held_bytes(codes, tables, steps)
    links = {link: (Busy(), Busy()) for link in tables.host_links}
    shared = len(links) < len(order)
    choosers = [
        Chooser(row, tables, steps, held[rank], played.of(rank), links[tables.host_links[rank]], shared)
        for rank, row in enumerate(order)
    ]
    forwards = [
        (played.end_us[rank][position], rank, position, action)
        for rank, row in enumerate(order)
        for position, action in enumerate(row)
        if action.op is Op.F
    ]
    shares = [[0.0] * tables.num_chunks for _ in tables.rank_of]
    for _, rank, position, action in sorted(forwards):
        _, stage, c = action
        share, chooser = min(wanted[stage][c], tables.offloadable_share), choosers[rank]
        kept_bytes = tables.kept_bytes(stage, c, steps[stage][c])
        if int(share * kept_bytes) and chooser.most_bytes(stage, c, kept_bytes):
            needed_us = played.start_us[rank][chooser.leaves[stage, c]]
            if chooser.take(action, position, share, needed_us, 0.0):
                shares[stage][c] = share
    return Offload(steps, tuple(map(tuple, shares)), tuple(chooser.copies for chooser in choosers))
