"""Insertion of the vocabulary shards' operations into an order: an event-driven run of the pipeline."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from megatron_epp.planner.kernels.codes import ADDED, BACKWARD, FORWARD, KIND_BITS, KIND_MASK, WEIGHT
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, compiled
from megatron_epp.planner.kernels.pass_table import PassTable
from megatron_epp.planner.kernels.timing import STUCK, arrived_us, durations

SHARD, LOSS, GRADIENT = ADDED, ADDED + 1, ADDED + 2
"""Kinds of `S`, `N` and `T` in orders with shards."""


class Shards(NamedTuple):
    """Times and bytes of shards, and storage for a run."""

    # line, position: chunks in the order of the last stage's forwards, empty without shards, and where in it each is
    line: IntegerList
    position: IntegerList
    split: IntegerList  # by item, nonzero if its weight gradient is an action of its own
    took_us: FloatList  # time of every action, by node
    # spread_us, gather_us: time of the collectives, by chunk
    spread_us: FloatList
    gather_us: FloatList
    # peak_bytes, kept_bytes: of a chunk while its `S` runs and from there to its `T`, rank by rank
    peak_bytes: IntegerList
    kept_bytes: IntegerList
    room_bytes: IntegerList  # of each rank, for all of its chunks between `S` and `T`
    last_rank: int
    backward: int  # 0 in a forward-only order, which has no `T`
    # came_us, gathered_us, finished: by position in `line`: end of the forward and of the last `S` so far, and how many ran
    came_us: FloatList
    gathered_us: FloatList
    finished: IntegerList
    # at, shards, gradients, losses: progress of each rank in its base order and in `line`; of `losses` the first entry
    at: IntegerList
    shards: IntegerList
    gradients: IntegerList
    losses: IntegerList
    # clock_us, held_bytes: time and bytes of each rank
    clock_us: FloatList
    held_bytes: IntegerList
    # choice, when_us, stale: what each rank runs next and when; nonzero if that must be decided again
    choice: IntegerList
    when_us: FloatList
    stale: IntegerList
    ended_us: FloatList  # end of each node; negative while it has not run
    # out, first, filled: the new order, where each rank's begins and how far it is written
    out: IntegerList
    first: IntegerList
    filled: IntegerList


@compiled
def insert(
    actions: IntegerList, starts: IntegerList, ends: IntegerList, columns: PassTable, recompute_steps: IntegerList, run: Shards
) -> float:
    """Run the pipeline, write the order with `S`, `N` and `T` to `run.out`, and return its makespan in microseconds or `STUCK`.

    The rank whose next action starts first runs it, so all that could come earlier is known. A rank prefers the loss to a
    shard, and a shard to its next forward or backward, if both can start at the same time. A weight gradient runs if nothing
    else can start before it ends, or if its memory is needed.
    """
    reset(actions, starts, ends, run)
    if run.backward != 0:
        durations(columns, recompute_steps, run.split, run.took_us)
    ranks = len(ends)
    left = len(run.line) * ((2 if run.backward != 0 else 1) * ranks + 1)
    for rank in range(ranks):
        left += ends[rank] - starts[rank]
    for _ in range(left):
        first, first_us = -1, inf
        for rank in range(ranks):
            if run.stale[rank] != 0:
                decide(rank, actions, ends, columns, run)
                run.stale[rank] = 0
            if run.when_us[rank] < first_us:
                first, first_us = rank, run.when_us[rank]
        if first < 0:
            return STUCK
        commit(first, actions, columns, run)
    makespan_us = 0.0
    for rank in range(ranks):
        makespan_us = max(makespan_us, run.clock_us[rank])
    return makespan_us


@compiled
def reset(actions: IntegerList, starts: IntegerList, ends: IntegerList, run: Shards) -> None:
    """Read an order's split weight gradients and its last stage's forwards, and forget what ran. Arguments as in `insert`."""
    chunks, stages = len(run.line), len(run.split) // len(run.line)
    at = 0
    for item in range(len(run.split)):
        run.split[item] = 0
    for rank in range(len(ends)):
        for action in range(starts[rank], ends[rank]):
            kind, item = actions[action] & KIND_MASK, actions[action] >> KIND_BITS
            if kind == WEIGHT:
                run.split[item] = 1
            elif kind == FORWARD and item // chunks == stages - 1 and at < chunks:
                run.line[at], run.position[item % chunks] = item % chunks, at
                at += 1
        run.at[rank], run.filled[rank] = starts[rank], run.first[rank]
        run.shards[rank] = run.gradients[rank] = run.held_bytes[rank] = 0
        run.clock_us[rank], run.stale[rank] = 0.0, 1
    run.losses[0] = 0
    for at in range(chunks):
        run.came_us[at], run.gathered_us[at], run.finished[at] = -1.0, 0.0, 0
    for node in range(len(run.ended_us)):
        run.ended_us[node] = -1.0


@compiled
def decide(rank: int, actions: IntegerList, ends: IntegerList, columns: PassTable, run: Shards) -> None:
    """Choose what a rank runs next, and when, from what is known. Arguments as in `insert`."""
    chunks, ranks, items = len(run.line), len(ends), columns.num_items
    now = run.clock_us[rank]
    base_us = shard_us = loss_us = gradient_us = inf
    if run.at[rank] < ends[rank]:
        code = actions[run.at[rank]]
        arrived = arrived_us((code & KIND_MASK) * items + (code >> KIND_BITS), columns, run.ended_us)
        base_us = max(now, arrived) if arrived >= 0.0 else inf
    at = run.shards[rank]
    is_full = False
    if at < chunks and run.came_us[at] >= 0.0:
        c = run.line[at]
        is_full = run.held_bytes[rank] + run.peak_bytes[rank * chunks + c] > run.room_bytes[rank]
        if not is_full:
            shard_us = max(now, run.came_us[at] + run.spread_us[c])
    if rank == run.last_rank and run.losses[0] < chunks and run.finished[run.losses[0]] == ranks:
        loss_us = max(now, run.gathered_us[run.losses[0]] + run.gather_us[run.line[run.losses[0]]])
    at = run.gradients[rank]
    other_us = min(base_us, shard_us, loss_us)
    run.choice[rank], run.when_us[rank] = FORWARD, other_us
    if run.backward != 0 and at < run.shards[rank] and run.finished[at] == ranks:
        c = run.line[at]
        gradient_us = max(now, run.gathered_us[at] + run.gather_us[c])
        ended_us = gradient_us + run.took_us[GRADIENT * items + rank * chunks + c]
        if ended_us <= other_us or (is_full and gradient_us <= other_us):
            run.choice[rank], run.when_us[rank] = GRADIENT, gradient_us
            return
    if other_us == inf:
        return
    if loss_us <= other_us:
        run.choice[rank] = LOSS
    elif shard_us <= other_us:
        run.choice[rank] = SHARD


@compiled
def commit(rank: int, actions: IntegerList, columns: PassTable, run: Shards) -> None:
    """Run what a rank has chosen. Arguments as in `insert`."""
    chunks, ranks, items, choice = len(run.line), len(run.at), columns.num_items, run.choice[rank]
    everyone, other = False, rank
    if choice == FORWARD:  # or whatever comes next in the base order
        code = actions[run.at[rank]]
        kind, item = code & KIND_MASK, code >> KIND_BITS
        run.at[rank] += 1
    else:
        kind = choice
        at = run.shards[rank] if kind == SHARD else run.gradients[rank] if kind == GRADIENT else run.losses[0]
        item = (0 if kind == LOSS else rank * chunks) + run.line[at]
        code = item << KIND_BITS | kind
    node = kind * items + item
    ended = run.when_us[rank] + run.took_us[node]
    run.ended_us[node] = run.clock_us[rank] = ended
    stage, c = item // chunks, item % chunks
    if kind == FORWARD:
        if stage + 1 < columns.num_stages:
            other = columns.rank_of[stage + 1]
        else:
            run.came_us[run.position[c]] = ended
            everyone = True
    elif kind == BACKWARD and stage > 0:
        other = columns.rank_of[stage - 1]
    elif kind == SHARD:
        at = run.shards[rank]
        run.shards[rank] += 1
        run.held_bytes[rank] += run.kept_bytes[item]
        run.finished[at] += 1
        run.gathered_us[at] = max(run.gathered_us[at], ended)
        everyone = run.finished[at] == ranks
    elif kind == GRADIENT:
        run.gradients[rank] += 1
        run.held_bytes[rank] -= run.kept_bytes[item]
    elif kind == LOSS:
        run.losses[0] += 1
    run.out[run.filled[rank]] = code
    run.filled[rank] += 1
    run.stale[rank] = run.stale[other] = 1
    if everyone:
        for each in range(ranks):
            run.stale[each] = 1
