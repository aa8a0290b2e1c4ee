"""KV offload: its greedy choice, and tables and plan entries where some keys and values are in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.cost.kv_cache import KVOffloadCosts
from megatron_epp.cost.work import BoolColumn
from megatron_epp.plan import Action, Chunk, KVOffload
from megatron_epp.plan.kv_offload import kv_offload_changes, slices_in
from megatron_epp.plan.recompute import MODES
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.recompute import least_peaks, peaks_bytes
from megatron_epp.planner.order import Order
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.tabulate import tabulate

Pairs = frozenset[tuple[int, int]]
"""Stages and sequences whose keys and values are in host memory."""

_ROWS = (
    "forward_us",
    "forward_alloc",
    "forward_free",
    "backward_us",
    "backward_head",
    "backward_release_per_layer",
    "backward_layer_peak",
    "backward_constant",
    "backward_half_peak",
    "backward_residual",
    "split_layer_peak",
)
_FRONTIER_COLUMNS = "mode", "saved", "layer_us", "fuller"
SHARING = 2.0
"""Factor by which the link slows down for KV offload and for copies of activations each, where a plan has both. Assumed: each
gets half of the link whenever it copies, which counts too much where they do not copy at once.
"""


def with_kv_offload(
    tables: Tables,
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    modes: Sequence[str],
    pairs: Pairs,
    sharing: float = 1.0,
    in_order: bool = False,
) -> Tables:
    """Compute the tables of a plan with KV offload.

    A pass takes longer by the part of the streaming that attention does not hide, and holds pieces while it runs in the place
    of caches that stay.

    Args:
        tables: of a plan without KV offload.
        chunks, problem, costs, modes, in_order: the arguments from which `tables` were made.
        pairs: stages and sequences whose keys and values are in host memory.
        sharing: factor by which the link is slower for each of its uses.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple, problem.trained)
    bare = tabulate(chunks, problem, costs, modes, in_order, without_caches(work))
    found = _kv_offload_costs(costs, work, pairs, sharing)
    slices = slices_in(chunks, problem.lengths)
    attending = {position for position, mode in enumerate(MODES.values()) if mode.repeats_attention}
    items = [(s, c) for s, sequence in pairs for c in slices.get(sequence, ())]
    rows = _merged(tables, bare, _ROWS, items)
    frontier = [
        replace(own, **_merged(own, other, _FRONTIER_COLUMNS, items))
        for own, other in zip(tables.frontier, bare.frontier, strict=True)
    ]
    for s, c in items:
        host = found[s]
        rows["forward_us"][s][c] += float(host.forward_us[c])
        rows["forward_alloc"][s][c] += int(host.forward_bytes[c])
        rows["forward_free"][s][c] += int(host.forward_bytes[c])
        if problem.forward_only:
            continue
        rows["backward_us"][s][c] += float(host.backward_us[c])
        rows["backward_constant"][s][c] += int(host.backward_bytes[c])
        if repeating := next((frontier_step for frontier_step in frontier if frontier_step.mode[s][c] in attending), None):
            repeating.layer_us[s][c] += float(host.again_us[c])  # attention, run again, streams them again
    return replace(tables, **rows, frontier=tuple(frontier), host_us_per_byte=tables.host_us_per_byte * sharing)


def without_caches(work: ChunkWork, which: BoolColumn | None = None) -> ChunkWork:
    """Return the work without keys and values of slices on the device.

    Args:
        work: of the chunks.
        which: of those chunks; None for all.
    """
    return replace(work, cache_tokens=np.where(True if which is None else which, 0, work.cache_tokens))


def _merged(own: Any, other: Any, names: Iterable[str], items: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Merge the named rows ``[stage][chunk]``: the listed entries come from `other`. Rows that stages share are copied first.

    Args:
        own, other: objects with these rows, in the same shapes.
        names: of the rows.
        items: stage and chunk of the entries to replace.
    """
    stages, merged = {stage for stage, _ in items}, {}
    for name in names:
        merged[name] = rows = [list(row) if stage in stages else row for stage, row in enumerate(getattr(own, name))]
        for stage, c in items if rows else ():
            rows[stage][c] = getattr(other, name)[stage][c]
    return merged


def _kv_offload_costs(costs: Costs, work: ChunkWork, pairs: Pairs, sharing: float = 1.0) -> dict[int, KVOffloadCosts]:
    """Compute the costs of KV offload for every stage that has any, in stage order; equal stages are evaluated once.

    Args:
        costs: of the pipeline.
        work: of the chunks.
        pairs: stages and sequences whose keys and values are in host memory.
        sharing: factor by which the link is slower for each of its uses.
    """
    equal_stages, stages = costs.equal_stages, sorted({stage for stage, _ in pairs})
    distinct = {first: costs.kv_offload_costs(first, work, sharing) for first in {equal_stages[stage] for stage in stages}}
    return {stage: distinct[equal_stages[stage]] for stage in stages}


def kv_offload_entries(chunks: Sequence[Chunk], problem: Problem, costs: Costs, pairs: Pairs) -> tuple[KVOffload, ...]:
    """List the plan's entries of KV offload: bytes of keys and values and of their gradient, by stage and sequence.

    Args:
        chunks, problem, costs, pairs: as `with_kv_offload` takes them.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    slices = slices_in(chunks, problem.lengths)
    found, entries = _kv_offload_costs(costs, work, pairs), []
    for stage, sequence in sorted(pairs):
        sizes, c = found[stage], slices[sequence][-1]
        gradient = 0 if problem.forward_only else int(sizes.gradient_bytes[c])
        entries.append(KVOffload(stage, sequence, int(sizes.cache_bytes[c]), gradient))
    return tuple(entries)


def choices(
    order: Order,
    tables: Tables,
    chunks: Sequence[Chunk],
    problem: Problem,
    costs: Costs,
    modes: Sequence[str],
    in_order: bool = False,
) -> tuple[Pairs, Pairs]:
    """Choose stages and sequences for KV offload; none where no rank lacks memory or none of its sequences is cut.

    Args:
        order: of all actions.
        tables, chunks, problem, costs, modes, in_order: as `with_kv_offload` takes them.

    Returns:
        two choices: on every rank that is above its cap even when all recomputes, the largest caches, until it is not; and in
        addition to these all pairs of every rank that recomputes anything.
    """
    sizes = _sizes(tables, chunks, problem)
    codes = encode(order, len(chunks))
    none = [[0] * len(chunks) for _ in tables.rank_of]
    caps, recomputing = problem.cap_bytes, peaks_bytes(codes, tables, none)
    needed: Pairs = frozenset()
    above = [rank for rank, peak in enumerate(least_peaks(codes, tables)) if peak > caps[rank]]
    count = 1
    while above:
        more = {pair for rank in above for pair in sizes[rank][:count]}
        if needed | more == needed:
            break
        needed |= more
        now = with_kv_offload(tables, chunks, problem, costs, modes, needed, in_order=in_order)
        above = [rank for rank, peak in enumerate(least_peaks(codes, now)) if peak > caps[rank]]
        count *= 2
    return needed, needed.union(*(sizes[rank] for rank, peak in enumerate(recomputing) if peak > caps[rank]))


def kv_offload_host_bytes(order: Order, chunks: Sequence[Chunk], problem: Problem, costs: Costs, pairs: Pairs) -> list[int]:
    """Compute the most bytes that every rank has in host memory by KV offload.

    Args:
        order: the actions of every rank.
        chunks, problem, costs, pairs: as `kv_offload_entries` takes them.
    """
    entries = kv_offload_entries(chunks, problem, costs, pairs)
    changes: Counter[tuple[Action, bool]] = Counter()
    for action, at_end, size in kv_offload_changes(entries, slices_in(chunks, problem.lengths), problem.forward_only):
        changes[action, at_end] += size
    rows = (accumulate((changes[each] for each in product(row, (False, True))), initial=0) for row in order)
    return list(map(max, rows))


def _sizes(tables: Tables, chunks: Sequence[Chunk], problem: Problem) -> list[list[tuple[int, int]]]:
    """List, for every rank, the stages and sequences open to KV offload, largest cache first.

    Args:
        tables: sizes in bytes.
        chunks: the chunk table.
        problem: the batch and the placement.
    """
    slices = slices_in(chunks, problem.lengths)

    def largest_first(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        return -tables.forward_alloc[pair[0]][slices[pair[1]][0]], pair

    return [sorted(product(stages, slices), key=largest_first) for stages in tables.stages_of]
