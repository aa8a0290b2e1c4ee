"""Caches of keys and values that stages have at the host: the pieces they move in, in plans and at run time alike, and what
of a plan is at the host when, in the units in which a run takes host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk
from megatron_epp.plan.plan import Hosted, Plan
from megatron_epp.plan.simulate import Timeline

MOST_PARTS = 4
"""Into so many groups of heads attention is divided at most: fewer heads at a time would leave a GPU idle at short slices."""


HOST_UNIT_BYTES = 256
"""Host memory is taken in so many bytes: for what is offloaded of a chunk, and for the cache of a sequence on a stage."""


def in_units(num_bytes: int) -> int:
    """What so many bytes take at the host."""
    return -(-num_bytes // HOST_UNIT_BYTES) * HOST_UNIT_BYTES


def head_parts(kv_heads: int) -> int:
    """Groups of heads that attention over a hosted cache runs by: as many as divide the heads, up to `MOST_PARTS`.

    Args:
        kv_heads: heads of keys and values on a rank.
    """
    return max(parts for parts in range(1, MOST_PARTS + 1) if kv_heads % parts == 0)


def host_levels(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """What a rank has at the host: steps ``(time_us, bytes)`` from time 0, each until the next.

    What is offloaded is there from where its offload is issued to where its load is, whose memory then is that of copies behind
    it; keys and values as `Hosted` says.
    """
    plan, level = timeline.plan, 0
    here = [entry for entry in plan.hosted if plan.placement[entry.stage] == rank]
    changes: Counter[tuple[Action, bool]] = Counter()
    for action, at_end, size in hosted_changes(here, slices_of(plan), plan.forward_only):
        changes[action, at_end] += size
    for copy in plan.copies[rank] if plan.copies else ():
        changes[copy.action, False] = in_units(copy.free_bytes) - in_units(copy.alloc_bytes)
    found = [(0.0, 0)]
    for event in timeline.memory_events[rank]:
        if size := changes[event.step.action, event.at_end]:
            level += size
            found.append((event.time_us, level))
    return found


def hosted_changes(
    entries: Iterable[Hosted], slices: Mapping[int, Sequence[int]], forward_only: bool
) -> Iterator[tuple[Action, bool, int]]:
    """When what is hosted comes to the host and goes: ``(action, whether at its end, bytes)``, in units of host memory.

    Args:
        entries: of a plan.
        slices: of every sequence that is cut, its chunks in order.
        forward_only: there are no backwards.
    """
    for stage, sequence, cache, gradient in entries:
        first, last = slices[sequence][0], slices[sequence][-1]
        yield Action(Op.F, stage, first), False, in_units(cache)
        if forward_only:
            yield Action(Op.F, stage, last), True, -in_units(cache)
        else:
            yield Action(Op.B, stage, last), False, in_units(cache + gradient) - in_units(cache)
            yield Action(Op.B, stage, first), True, -in_units(cache + gradient)


def host_peaks(timeline: Timeline) -> tuple[int, ...]:
    """Most bytes that each rank has at the host at one time."""
    return tuple(max(size for _, size in host_levels(timeline, rank)) for rank in range(timeline.plan.num_ranks))


def slices_of(plan: Plan) -> dict[int, list[int]]:
    """Of every sequence that is cut, its chunks in the order of its slices."""
    return slices_in(plan.chunks, plan.lengths)


def slices_in(chunks: Sequence[Chunk], lengths: Sequence[int]) -> dict[int, list[int]]:
    """The same of a chunk table."""
    found: dict[int, list[tuple[int, int]]] = {}
    for c, chunk in enumerate(chunks):
        if (part := chunk.slice_of(lengths)) is not None:
            found.setdefault(part.sequence, []).append((part.start, c))
    return {sequence: [c for _, c in sorted(parts)] for sequence, parts in found.items()}
