"""A second simulator, written apart from the package's: start times, bytes over time, and what a plan lacks.

It knows what must precede what in the words of the plan format, and nothing of the package's table of operations.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise

from megatron_epp.plan import Action, Op, Plan

Key = tuple[Op, int, int]
"""Operation, stage and chunk; for the operations on vocabulary shards the rank takes the place of the stage."""
Edge = tuple[Key, Key, float]
"""Two actions, of which the second waits for the end of the first and then for a message, in microseconds."""


def waited_for(plan: Plan) -> Iterator[Edge]:
    """Yield all dependencies that actions of a plan may have; either action may not be there."""
    placed = plan.placement
    splits = [(c, s) for c, ch in enumerate(plan.chunks) for s in ch.segments]
    if plan.borrowed:
        after = [(c, d) for d, t in splits for c in _read_by(plan, *t[:2]) if c != d]
    else:
        after = [(c, d) for c, s in splits for d, t in splits if (s.sequence, s.end) == (t.sequence, t.start)]
    chunks, stages = range(len(plan.chunks)), range(plan.num_stages)
    for s in stages:
        for c in chunks:
            yield from [((Op.F, s, c), (Op.B, s, c), 0), ((Op.B, s, c), (Op.W, s, c), 0), ((Op.F, s, c), (Op.O, s, c), 0)]
            yield from [((Op.O, s, c), (Op.L, s, c), 0), ((Op.L, s, c), (Op.B, s, c), 0)]
            if s + 1 < plan.num_stages:
                apart = placed[s] != placed[s + 1]
                yield (Op.F, s, c), (Op.F, s + 1, c), plan.messages.activation_us[s][c] * apart
                yield (Op.B, s + 1, c), (Op.B, s, c), plan.messages.gradient_us[s][c] * apart
        for c, d in after:
            yield (Op.F, s, c), (Op.F, s, d), 0
            yield (Op.B, s, d), (Op.B, s, c), 0
    for group in plan.loss_groups:
        yield from (((Op.F, stages[-1], c), (Op.B, stages[-1], d), 0) for c in group for d in group)
    yield from _of_shards(plan)


def _read_by(plan: Plan, sequence: int, start: int) -> set[int]:
    """Return every chunk with a token that a segment's queries read ahead of it, token by token."""
    chunks = set()
    for token in range(start):
        holder = sequence
        while token < plan.borrowed[holder].tokens:
            holder = plan.borrowed[holder].sequence
        chunks |= {c for c, ch in enumerate(plan.chunks) for q, a, b in ch.segments if q == holder and a <= token < b}
    return chunks


def _of_shards(plan: Plan) -> Iterator[Edge]:
    """Yield what shards wait for: the broadcast of the last stage's output, and reductions over all ranks after logits."""
    last, ranks, collectives = plan.num_stages - 1, range(plan.num_ranks), dict(plan.messages.collective_us)
    for c in range(len(plan.chunks)):
        spread_us, gather_us = (collectives[op][c] if op in collectives else 0.0 for op in (Op.SPREAD, Op.GATHER))
        for rank in ranks:
            yield (Op.F, last, c), (Op.S, rank, c), spread_us
            yield (Op.S, rank, c), (Op.N, 0, c), gather_us
            for other in ranks:
                yield (Op.S, rank, c), (Op.T, other, c), gather_us
        yield (Op.N, 0, c), (Op.B, last, c), 0


def _key(action: Action) -> Key:
    return action.op, action.stage, action.chunk


def times(plan: Plan) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return the start of every action and the time it takes, in microseconds. Raises `CycleError` for a deadlock."""
    tracks = [*plan.ranks, *plan.copies]
    took = {_key(step.action): step.time_us for row in tracks for step in row}
    step_of = {_key(action): _key(step.action) for row in tracks for step in row for action in step.actions}
    edges = [(step_of[a], step_of[b], us) for a, b, us in waited_for(plan) if a in step_of and b in step_of]
    edges += [(_key(a.action), _key(b.action), 0) for row in tracks for a, b in pairwise(row)]
    edges += [(_key(copy.after), _key(copy.action), 0) for row in plan.copies for copy in row if copy.after is not None]
    before: dict[Key, list[tuple[Key, float]]] = defaultdict(list)
    for first, then, message_us in edges:
        before[then].append((first, message_us))
    start: dict[Key, float] = {}
    for action in TopologicalSorter({then: [first for first, _ in before[then]] for then in took}).static_order():
        start[action] = max((start[first] + took[first] + message_us for first, message_us in before[action]), default=0.0)
    return start, took


def changes(
    plan: Plan, rank: int, start: Mapping[Key, float], took: Mapping[Key, float]
) -> Iterator[tuple[tuple[float, int, float], int]]:
    """Yield when steps take and give back bytes: (time, order at that time, place), bytes.

    What a copy does while an action runs it does for all of that action: a load takes from its start, an offload has until its
    end. A load comes behind its own offload even so.
    """
    spans = [(start[tuple(step.action)], start[tuple(step.action)] + took[tuple(step.action)]) for step in plan.ranks[rank]]
    for place, ((begin, end), step) in enumerate(zip(spans, plan.ranks[rank], strict=True)):
        yield (begin, 2, place), step.alloc_bytes
        yield (end, 0, place) if begin < end else (end, 2, place + 0.5), -step.free_bytes  # not before it has taken them
    issued, freed = 0.0, {}
    for place, (action, _, takes, gives, _) in enumerate(plan.copies[rank] if plan.copies else ()):
        _, *key = action
        begins, ends = start[tuple(action)], start[tuple(action)] + took[tuple(action)]
        issued = max(issued, next((begin for begin, end in spans if begin < begins < end), begins))
        if action.op is Op.L:
            issued = max(issued, freed[tuple(key)])
            yield (issued, 1, place), takes
        else:
            freed[tuple(key)] = next((end for begin, end in spans if begin < ends < end), ends)
            yield (freed[tuple(key)], 1, place), -gives


def faults(plan: Plan) -> list[str]:
    """Say what is missing or doubled in a plan that a planner made, and where its predictions are not those found here."""
    stages, ranks, chunks = range(plan.num_stages), range(plan.num_ranks), range(len(plan.chunks))
    wanted = Counter((Op.F, s, c) for s in stages for c in chunks)
    if any(step.action.op is Op.S for row in plan.ranks for step in row):
        wanted.update([(Op.N, 0, c) for c in chunks] + [(Op.S, rank, c) for rank in ranks for c in chunks])
        wanted.update((Op.T, rank, c) for rank in ranks for c in chunks if not plan.forward_only)
    wanted.update((Op.B, s, c) for s in stages for c in chunks if not plan.forward_only)
    there = Counter(tuple(action) for row in plan.ranks for step in row for action in step.actions)
    found = [f"{key}: {there[key]} times, not {count}" for key, count in wanted.items() if there[key] != count]
    found += [f"{key}: not wanted" for key in there if key not in wanted and key[0] not in (Op.W, Op.R)]
    start, took = times(plan)
    makespan_us = max(start[action] + took[action] for action in start)
    if not math.isclose(makespan_us, plan.predicted.makespan_us, rel_tol=1e-9):
        found.append(f"it takes {makespan_us} us, and {plan.predicted.makespan_us} us are predicted")
    for rank, static in enumerate(plan.static_bytes):
        sizes = [size for _, size in sorted(changes(plan, rank, start, took))]
        *_, left = totals = list(accumulate(sizes, initial=static))
        if max(totals) != plan.predicted.peak_bytes[rank] or left != static:
            found.append(
                f"rank {rank} holds {max(totals)} bytes at most and {left} in the end, where {plan.predicted.peak_bytes[rank]} "
                f"and {static} are predicted"
            )
        if max(totals) > plan.cap_bytes[rank]:
            found.append(f"rank {rank} holds {max(totals)} bytes of {plan.cap_bytes[rank]}")
    return found
