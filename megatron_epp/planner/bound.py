"""A makespan that no plan over a chunk table beats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Chunk, Op
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables, Times, subtract_times


def lower_bound_us(
    tables: Tables,
    chunks: tuple[Chunk, ...] = (),
    problem: Problem | None = None,
    options: Options = Options(),  # noqa: B008 - frozen
) -> float:
    """Compute a makespan, in microseconds, that no order, recompute, offload or placement of weight gradients can beat.

    It is a bound for the chunk table, not for all ways to cut the batch: a finer table has a shorter fill and drain and more
    overhead. The larger of two numbers:

    *A rank's time.* A rank runs every forward, backward and weight gradient of its stages one after another. It cannot start
    before some chunk has come through all earlier stages, and after its last backward that chunk still has to go back through
    them (in a forward-only plan, on through the later ones). To that comes recompute that the cap forces: when the backward of
    a sequence's last slice starts on the rank's last stage, all slices of the sequence have run forward on all of the rank's
    stages and none backward, so what they all keep is live in addition to the static bytes and the sequence's keys, values and
    their gradient. The bytes above the cap must have been given up by recomputing layers of these slices. The least time that
    can take solves a fractional knapsack: layers in the order of time per byte. A chunk belongs to one sequence (or is
    one batched chunk), so the times of several sequences add. With a link to the host, keys and values may be there, and bytes
    may be copied away and back instead; copies of a rank run one at a time, so the copied bytes cannot take longer than the
    makespan, and what is dearest to recompute is copied. Weight gradients that are split off can run while the last chunk goes
    back, so then the rank's time is the larger of all its work, and of its work without them followed by that way back.

    A rank's shard of the vocabulary runs before its last backward, and the shard's weight gradient may run after it. In a
    forward-only plan shards may run while the last chunk goes on. Memory set aside for shards need not be used.

    *A chunk's time.* Every chunk passes all stages forward and back one after another, and on the first its weight gradient
    follows.

    Args:
        chunks, problem: needed for the recompute that the caps force; without them it is left out.
        options: whether weight gradients are split off and copies allowed.
    """
    split = options.split_weight and bool(tables.backward_us)
    # With split weight gradients, a backward and its weight gradient take no longer than the backward that is not split.
    backward = subtract_times(tables.backward_us, tables.weight_us) if split else tables.backward_us
    last_us = tables.weight_us[0] if split else [0.0] * tables.num_chunks
    arrive = _ways(tables.forward_us, tables.hops, [0.0] * len(last_us))
    if backward:
        leave = _ways(backward, tables.hops, last_us)
        turn = [sum(parts) for parts in zip(tables.forward_us[-1], tables.turn_us, backward[-1], strict=True)]
    else:
        leave = _ways(tables.forward_us[::-1], tables.hops[::-1], last_us)[::-1]
        turn = [sum(parts) for parts in zip(tables.forward_us[-1], tables.turn_us, strict=True)]
    bound = max(map(sum, zip(arrive[-1], turn, leave[-1] if backward else last_us, strict=True)))
    per_byte = 2 * tables.host_us_per_byte if options.offload else np.inf
    groups = slice_groups(chunks) if problem is not None and backward else []
    starts = np.array([group.start for group in groups])
    shards = tables.added.get(Op.S)
    for rank, stages in enumerate(tables.stages_of):
        start_us = min(min(arrive[stage]) for stage in stages)
        end_us = min(min(leave[stage]) for stage in stages)
        busy_us = tables.busy_us(rank, backward)
        late_us = sum(sum(tables.weight_us[stage]) for stage in stages) if split else 0.0
        if shards is not None and backward:
            busy_us += sum(shards.time_us[rank])
            late_us += sum(tables.added[Op.T].time_us[rank])
        elif shards is not None:
            late_us += sum(shards.time_us[rank])
        pieces: list[tuple[float, float]] = []
        if problem is not None and backward:
            pieces = _forced(tables, chunks, groups, starts, rank, problem.cap_bytes[rank], options.offload)
        bound = max(bound, _with_copies(start_us + busy_us + max(late_us, end_us), pieces, per_byte))
    return bound


def _forced(
    tables: Tables,
    chunks: Sequence[Chunk],
    groups: list[range],
    starts: NDArray[np.int64],
    rank: int,
    cap: int,
    copies: bool,
) -> list[tuple[float, float]]:
    """Least recompute that the cap forces, as pieces ``(time per byte, bytes)``.

    Args:
        chunks: the table. Where it is not in forward order, runs of slices of several sequences force nothing: these need not
            be alive together.
        groups, starts: the chunks of every sequence, and the first of each.
        cap: bytes.
        copies: keys and values may be in host memory, so they force none.
    """
    kept_bytes = np.zeros(len(chunks), dtype=np.int64)
    for stage in tables.stages_of[rank]:
        stays = np.array(tables.forward_alloc[stage]) - np.array(tables.forward_free[stage])
        kept_bytes += np.array(tables.activation[stage]) + (0 if copies else stays)
    excess = np.add.reduceat(kept_bytes, starts) + tables.static[rank] - tables.shard_room[rank] - cap
    above = np.flatnonzero(excess > 0).tolist()
    if not above:
        return []
    frontier = [
        (saved.tolist(), most.tolist(), step.layer_us.tolist())
        for stage in tables.stages_of[rank]
        for step, (saved, most) in zip(tables.passes[stage].frontier, tables.passes[stage].savings, strict=True)
    ]
    pieces: list[tuple[float, float]] = []
    for number in above:
        if len({chunks[c].segments[0].sequence for c in groups[number]}) > 1:
            continue
        need = int(excess[number])
        offers = [(us[c] / most[c], saved[c]) for c in groups[number] for saved, most, us in frontier if saved[c] > 0]
        for price, offered in sorted(offers):
            taken = min(need, offered)
            pieces.append((price, taken))
            need -= taken
            if need <= 0:
                break
    return pieces


def _with_copies(base_us: float, pieces: list[tuple[float, float]], copy_us_per_byte: float) -> float:
    """Compute the least time if bytes may be copied instead of recomputed, dearest first, while copies take no longer.

    Args:
        base_us: time of the rank without recompute.
        pieces: forced recompute, as ``(microseconds per byte, bytes)``.
        copy_us_per_byte: time of a copy to the host and back; infinite where copies are not allowed.
    """
    total_us = base_us + sum(price * size for price, size in pieces)
    copied_us = 0.0
    dearest_first = sorted((piece for piece in pieces if piece[0] > 0), reverse=True)
    for price, size in dearest_first if copy_us_per_byte < np.inf else ():
        # Copying all of the piece: recompute falls, copies grow; stop where they meet.
        share = min(1.0, max(0.0, total_us - copied_us) / (size * (price + copy_us_per_byte)))
        total_us -= share * size * price
        copied_us += share * size * copy_us_per_byte
        if share < 1.0:
            break
    return total_us


def _ways(times: Times, hops: Times, first: list[float]) -> Times:
    """Sum, for every stage and chunk, `first`, the times of all earlier stages, and the times of the messages between.

    Args:
        times: of forwards or backwards in microseconds, ``[stage][chunk]``.
        hops: of the messages behind each stage but the last, in microseconds, ``[stage][chunk]``.
        first: what is added at the first stage, in microseconds, by chunk.
    """
    ways = [first]
    for row, hop_us in zip(times[:-1], hops, strict=True):
        ways.append([way + time + hop for way, time, hop in zip(ways[-1], row, hop_us, strict=True)])
    return ways
