"""A makespan that no plan over a chunk table beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_epp.cost.work import TimeColumn
from megatron_epp.plan import Chunk
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.operations import Presence, of_ranks, operation
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.passes import StagePasses
from megatron_epp.planner.tables import Tables


def lower_bound_us(
    tables: Tables,
    chunks: tuple[Chunk, ...] = (),
    problem: Problem | None = None,
    options: Options = Options(),  # noqa: B008 - frozen
) -> float:
    """Compute a makespan, in microseconds, that no order, recompute, offload or placement of weight gradients can beat.

    It is a bound for the chunk table, not for all ways to cut the batch. The larger of two numbers:

    *A rank's time.* A rank runs all passes of its stages one after another. It cannot start before some chunk has come through
    all earlier stages, and after its last backward that chunk still has to go back through them (in a forward-only plan, on
    through the later ones). To that comes recompute that the cap forces: when the backward of a sequence's last slice starts on
    the rank's last stage, all slices have run forward on all of the rank's stages and none backward, so what they all keep is
    live in addition to the static bytes and the sequence's keys, values and their gradient. The bytes above the cap must have
    been given up by recomputing layers of these slices. The least time for that solves a fractional knapsack: layers in the
    order of time per byte. A chunk belongs to one sequence (or is one batched chunk), so the times of several sequences add.
    With a link to the host, keys and values may be there, and what is dearest to recompute may be copied away and back instead,
    no longer than the makespan, since copies of a rank run one at a time. Weight gradients that are split off can run while the
    last chunk goes back, so then the rank's time is the larger of all its work, and of its work without them followed by that
    way back.

    An added operation of every rank, such as a vocabulary shard, runs before the rank's last backward, and its weight gradient
    may run after that. In a forward-only plan it may run while the last chunk goes on. Memory set aside need not be used.

    *A chunk's time.* Every chunk passes all stages forward and back, and on the first its weight gradient follows.

    Recompute that the caps force needs `chunks` and `problem`, and is left out without them.
    """
    passes, trains, split = tables.passes, tables.trains, options.split_weight and tables.trains
    # With split weight gradients, a backward and its weight gradient take no longer than the backward that is not split.
    backward_us = {own: own.backward_us - own.weight_us if split else own.backward_us for own in dict.fromkeys(passes)}
    forward_rows, backward_rows = [own.forward_us for own in passes], [backward_us[own] for own in passes]
    last_us = passes[0].weight_us if split else np.zeros(tables.num_chunks)
    arrive = _ways(forward_rows, tables.hops, np.zeros(len(last_us)))
    if trains:
        leave = _ways(backward_rows, tables.hops, last_us)
    else:
        leave = _ways(forward_rows[::-1], tables.hops[::-1], last_us)[::-1]
    # Numbers of Python's own: `sum` rounds others another way.
    turn = map(sum, zip(forward_rows[-1].tolist(), tables.turn_us, backward_rows[-1].tolist(), strict=True))
    bound = max(map(sum, zip(arrive[-1].tolist(), turn, (leave[-1] if trains else last_us).tolist(), strict=True)))
    per_byte = 2 * tables.host_us_per_byte if options.offload else np.inf
    forced = _Forced(tables, chunks, options.offload) if problem is not None and trains else None
    first_us, left_us = (ways_us.min(axis=1).tolist() for ways_us in (arrive, leave))
    sums_us = {own: [sum(row.tolist()) for row in (own.forward_us, backward_us[own], own.weight_us)] for own in backward_us}
    every_rank = [(operation(op), rows.time_us) for op, rows in tables.added.items() if operation(op).sites is of_ranks]
    for rank, stages in enumerate(tables.stages_of):
        start_us, end_us = (min(by_stage_us[stage] for stage in stages) for by_stage_us in (first_us, left_us))
        forward, backward, weight = zip(*(sums_us[passes[stage]] for stage in stages), strict=True)
        busy_us, late_us = sum((*forward, *backward)), sum(weight) if split else 0.0
        for kind, time_us in every_rank:
            if trains and not kind.gives_gradients:
                busy_us += sum(time_us[rank])
            elif trains or kind.presence is Presence.COMPLETE_ALWAYS:
                late_us += sum(time_us[rank])
        pieces = [] if forced is None or problem is None else forced.pieces(rank, problem.cap_bytes[rank])
        bound = max(bound, _with_copies(start_us + busy_us + max(late_us, end_us), pieces, per_byte))
    return bound


class _Forced:
    """Recompute that caps force.

    Slices of a sequence that do not stand together in `chunks` force nothing: they need not be alive together. With `copies`
    keys and values may be in host memory, so they force none.
    """

    def __init__(self, tables: Tables, chunks: Sequence[Chunk], copies: bool) -> None:
        self.tables, self.groups = tables, slice_groups(chunks)
        before = slice_neighbours(chunks).previous
        self.is_one = [all(before[c] == (c - 1,) for c in group[1:]) for group in self.groups]
        self.starts = np.array([group.start for group in self.groups])
        self.kept_bytes = np.array(
            [own.activation + (0 if copies else own.forward_alloc - own.forward_free) for own in tables.passes]
        )
        self._offers: dict[StagePasses, NDArray[np.float64]] = {}

    def pieces(self, rank: int, cap: int) -> list[tuple[float, float]]:
        """Return the least recompute of a rank under a cap, as pieces ``(time per byte, bytes)``."""
        stages, tables = self.tables.stages_of[rank], self.tables
        kept_bytes = self.kept_bytes[list(stages)].sum(axis=0)
        excess = np.add.reduceat(kept_bytes, self.starts) + tables.static[rank] - tables.added_room[rank] - cap
        above = [number for number in np.flatnonzero(excess > 0).tolist() if self.is_one[number]]
        if not above:
            return []
        offers = np.concatenate([self._of(tables.passes[stage]) for stage in stages], axis=1)
        pieces: list[tuple[float, float]] = []
        for number in above:
            group = self.groups[number]
            price, size = offers[:, :, group.start : group.stop].reshape(2, -1)
            order = np.lexsort((size, price))
            price, size = price[order], size[order]
            before = np.cumsum(size) - size
            count = int(np.searchsorted(before, excess[number]))
            taken = np.minimum(size, excess[number] - before)[:count]
            pieces += [each for each in zip(price[:count].tolist(), taken.tolist(), strict=True) if each[1] > 0]
        return pieces

    def _of(self, passes: StagePasses) -> NDArray[np.float64]:
        if passes not in self._offers:
            saved, most = passes.savings
            self._offers[passes] = np.array([passes.frontier.layer_us / np.maximum(most, 1), np.maximum(saved, 0)])
        return self._offers[passes]


def _with_copies(base_us: float, pieces: list[tuple[float, float]], copy_us_per_byte: float) -> float:
    """Compute the least time if bytes may be copied instead of recomputed, dearest first, while copies take no longer.

    `pieces` are ``(microseconds per byte, bytes)``; a byte's copy is to the host and back, infinite where not allowed.
    """
    total_us = base_us + sum(price * size for price, size in pieces)
    if copy_us_per_byte == np.inf:
        return total_us
    copied_us = 0.0
    for price, size in sorted((piece for piece in pieces if piece[0] > 0), reverse=True):
        # Copying all of the piece: recompute falls, copies grow; stop where they meet.
        share = min(1.0, max(0.0, total_us - copied_us) / (size * (price + copy_us_per_byte)))
        total_us -= share * size * price
        copied_us += share * size * copy_us_per_byte
        if share < 1.0:
            break
    return total_us


def _ways(rows: Sequence[TimeColumn], hops: Sequence[TimeColumn], first: TimeColumn) -> NDArray[np.float64]:
    """Sum, for every stage and chunk, `first`, the times of all earlier stages, and those of the messages between, `hops`."""
    ways = np.empty((len(rows), len(first)))
    ways[0] = first
    for stage, hop_us in enumerate(hops):
        ways[stage + 1] = ways[stage] + rows[stage] + hop_us
    return ways
