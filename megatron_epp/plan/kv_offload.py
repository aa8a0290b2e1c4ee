"""KV offload, the key and value caches of stages in host memory: the pieces in which plans and runs move them, and the host
memory of a plan over time, in the units in which a run allocates it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Borrowed, Chunk, path_of
from megatron_epp.plan.plan import KVOffload, Plan
from megatron_epp.plan.simulation import Timeline, simulate

MOST_PARTS = 4
"""Largest number of groups of heads of attention. Not measured: fewer heads at a time would leave a GPU idle at short slices,
fewer groups take more device memory for the three pieces that it holds.
"""


HOST_UNIT_BYTES = 256
"""Unit in which host memory is allocated, for a chunk's offloaded activations and for a sequence's cache on a stage. Plans and
runs round up to it, so what fits on paper fits in a run.
"""


def in_units(num_bytes: int) -> int:
    """Host memory that a number of bytes takes, rounded up to whole units."""
    return -(-num_bytes // HOST_UNIT_BYTES) * HOST_UNIT_BYTES


def head_parts(kv_heads: int) -> int:
    """Number of groups of heads for attention with KV offload: the largest divisor of the heads up to `MOST_PARTS`."""
    return max(parts for parts in range(1, MOST_PARTS + 1) if kv_heads % parts == 0)


def host_memory(timeline: Timeline, rank: int) -> list[tuple[float, int]]:
    """Host memory of a rank over time: steps ``(time_us, bytes)`` from time 0, each valid until the next.

    Offloaded activations take host memory from the issue of their offload to the issue of their load, after which later copies
    reuse it; keys and values as described in `KVOffload`.
    """
    plan, level = timeline.plan, 0
    here = [entry for entry in plan.kv_offload if plan.placement[entry.stage] == rank]
    changes: Counter[tuple[Action, bool]] = Counter()
    for action, at_end, size in kv_offload_changes(here, slices_of(plan), plan.forward_only):
        changes[action, at_end] += size
    for copy in plan.copies[rank] if plan.copies else ():
        changes[copy.action, False] = in_units(copy.free_bytes) - in_units(copy.alloc_bytes)
    levels = [(0.0, 0)]
    for event in timeline.memory_events(rank):
        if size := changes[event.step.action, event.at_end]:
            level += size
            levels.append((event.time_us, level))
    return levels


def kv_offload_changes(
    entries: Iterable[KVOffload], slices: Mapping[int, Sequence[int]], forward_only: bool
) -> Iterator[tuple[Action, bool, int]]:
    """Yield the changes of host memory by KV offload: ``(action, whether at its end, bytes)``, in units of host memory."""
    for stage, sequence, cache, gradient in entries:
        first, last = slices[sequence][0], slices[sequence][-1]
        yield Action(Op.F, stage, first), False, in_units(cache)
        if forward_only:
            yield Action(Op.F, stage, last), True, -in_units(cache)
        else:
            yield Action(Op.B, stage, last), False, in_units(cache + gradient) - in_units(cache)
            yield Action(Op.B, stage, first), True, -in_units(cache + gradient)


def host_peak_bytes(plan: Plan, timeline: Timeline | None = None) -> list[int]:
    """Peak host memory of each rank, in bytes.

    Args:
        timeline: of the plan; None to simulate it if it uses host memory.
    """
    if not plan.kv_offload and not any(plan.copies):
        return [0] * plan.num_ranks
    timeline = timeline or simulate(plan)
    return [max(size for _, size in host_memory(timeline, rank)) for rank in range(plan.num_ranks)]


def slices_of(plan: Plan) -> dict[int, list[int]]:
    """Chunks of every sequence of a plan that `slices_in` lists."""
    return slices_in(plan.chunks, plan.lengths, plan.borrowed)


def slices_in(chunks: Sequence[Chunk], lengths: Sequence[int], borrowed: Sequence[Borrowed] = ()) -> dict[int, list[int]]:
    """Chunks of every sequence whose slices all come first in their chunks, in the order of its slices.

    KV offload is for these: attention reads one slice at a time from the host, and the rest of a chunk on the device. Where
    sequences share prefixes it is for all that others, or later slices, read: their first chunks, and then all that read them.
    """
    if borrowed:
        parts_of = dict[int, list[int]]()
        for c, sequence, end in ((c, sequence, end) for c, chunk in enumerate(chunks) for sequence, _, end in chunk.segments):
            for holder, *_ in path_of(sequence, end, borrowed):
                parts_of.setdefault(holder, []).append(c)
        return {sequence: own for sequence, own in parts_of.items() if len(own) > 1}
    begun = {part.sequence for chunk in chunks if (part := chunk.begun_of(lengths)) is not None}
    starts: dict[int, list[tuple[int, int]]] = {}
    for c, chunk in enumerate(chunks):
        if (part := chunk.slice_of(lengths)) is not None and part.sequence not in begun:
            starts.setdefault(part.sequence, []).append((part.start, c))
    return {sequence: [c for _, c in sorted(parts)] for sequence, parts in starts.items()}
