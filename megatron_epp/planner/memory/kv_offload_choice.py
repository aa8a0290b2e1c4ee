"""KV offload: its greedy choice, and tables and plan entries where some keys and values are in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product

import numpy as np

from megatron_epp.cost.kv_costs import KVOffloadCosts
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import BoolColumn, ChunkWork, work_of
from megatron_epp.plan import Action, Chunk, KVOffload
from megatron_epp.plan.kv_offload import kv_offload_changes, slices_in
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import MODES
from megatron_epp.planner.evaluate import Copies
from megatron_epp.planner.fit import least_peaks, peaks_bytes
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.order import Order
from megatron_epp.planner.passes import StagePasses, passes_of
from megatron_epp.planner.tables import Tables, work_of_table

Pairs = frozenset[tuple[int, int]]
"""Stages and sequences whose keys and values are in host memory."""

SHARINGS = (1.1, 2.0)
"""Factors by which the link may be slower for KV offload because the plan copies activations, too. The first is for plans that
copy few of them (`leaves_link`).
"""
COPIES_SHARING = 2.0
"""The same for copies of activations: keys and values stream nearly always, so each gets half of the link."""


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
    """Compute the tables of a plan with KV offload from those without.

    A pass takes longer by the part of the streaming that attention does not hide, and holds pieces while it runs in the place
    of caches that stay. `sharing` is one of `SHARINGS`; 1 without copies of activations.
    """
    work = work_of_table(chunks, problem)
    host_costs, slices = _kv_offload_costs(costs, work, pairs, sharing), slices_in(chunks, problem.lengths)
    passes, known = list(tables.passes), dict[tuple[int, frozenset[int]], StagePasses]()
    for stage, host in host_costs.items():
        there, first_equal = frozenset(sequence for at, sequence in pairs if at == stage), costs.equal_stages_of(work)[stage]
        if (first_equal, there) not in known:
            which = np.zeros(len(chunks), dtype=np.bool_)
            which[[c for sequence in there for c in slices.get(sequence, ())]] = True
            bare = passes_of(stage, without_caches(work, which), costs, modes, in_order, problem.forward_only)
            known[first_equal, there] = streamed(bare, which, host)
        passes[stage] = known[first_equal, there]
    slower = COPIES_SHARING if sharing > 1 else 1.0
    return replace(tables, passes=tuple(passes), host_us_per_byte=tables.host_us_per_byte * slower)


def leaves_link(copies: Copies, tables: Tables, makespan_us: float, sharing: float) -> bool:
    """Return True if copies of activations take no more than half of the time on each link that `sharing` leaves them.

    Half: they are not spread evenly, and passes that run meanwhile have less of the link than the average.
    """
    took_us = dict.fromkeys(tables.host_links, 0.0)
    for link, row in zip(tables.host_links, copies, strict=True):
        took_us[link] += sum(time_us for _, time_us, _ in row) / COPIES_SHARING
    return max(took_us.values()) <= (1 - 1 / sharing) / 2 * makespan_us


def streamed(passes: StagePasses, which: BoolColumn, host: KVOffloadCosts) -> StagePasses:
    """Add times and device bytes of keys and values streamed from and to the host to a stage's passes without these caches."""
    pieces = np.where(which, host.forward_bytes, 0)
    passes = replace(
        passes,
        forward_us=passes.forward_us + np.where(which, host.forward_us, 0.0),
        forward_alloc=passes.forward_alloc + pieces,
        forward_free=passes.forward_free + pieces,
    )
    if not passes.trains:
        return passes
    repeats = np.isin(passes.frontier.mode, [at for at, mode in enumerate(MODES.values()) if mode.repeats_attention])
    repeats &= which & (np.cumsum(repeats, axis=0) == 1)  # attention, run again, streams them again
    return replace(
        passes,
        backward_us=passes.backward_us + np.where(which, host.backward_us, 0.0),
        streamed_bytes=np.where(which, host.backward_bytes, 0),
        frontier=passes.frontier._replace(layer_us=passes.frontier.layer_us + np.where(repeats, host.again_us, 0.0)),
    )


def without_caches(work: ChunkWork, which: BoolColumn | None = None) -> ChunkWork:
    """Return the work without keys and values on the device of slices: of those chunks; None for all."""
    return replace(work, cache_tokens=np.where(True if which is None else which, 0, work.cache_tokens))


def _kv_offload_costs(costs: Costs, work: ChunkWork, pairs: Pairs, sharing: float = 1.0) -> dict[int, KVOffloadCosts]:
    """Compute the costs of KV offload for every stage that has any, in stage order; equal stages are evaluated once."""
    equal_stages, stages = costs.equal_stages, sorted({stage for stage, _ in pairs})
    distinct = {first: costs.kv_offload_costs(first, work, sharing) for first in {equal_stages[stage] for stage in stages}}
    return {stage: distinct[equal_stages[stage]] for stage in stages}


def kv_offload_entries(chunks: Sequence[Chunk], problem: Problem, costs: Costs, pairs: Pairs) -> tuple[KVOffload, ...]:
    """List the plan's entries of KV offload: bytes of keys and values and of their gradient, by stage and sequence."""
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    slices = slices_in(chunks, problem.lengths)
    host_costs, entries = _kv_offload_costs(costs, work, pairs), []
    for stage, sequence in sorted(pairs):
        sizes, c = host_costs[stage], slices[sequence][-1]
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

    Returns two choices: on every rank that is above its cap even when all recomputes, the largest caches, until it is not; and
    in addition to these all pairs of every rank that recomputes anything.
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
    """Compute the most bytes that every rank has in host memory by KV offload. Arguments as in `kv_offload_entries`."""
    entries = kv_offload_entries(chunks, problem, costs, pairs)
    changes: Counter[tuple[Action, bool]] = Counter()
    for action, at_end, size in kv_offload_changes(entries, slices_in(chunks, problem.lengths), problem.forward_only):
        changes[action, at_end] += size
    rows = (accumulate((changes[each] for each in product(row, (False, True))), initial=0) for row in order)
    return list(map(max, rows))


def _sizes(tables: Tables, chunks: Sequence[Chunk], problem: Problem) -> list[list[tuple[int, int]]]:
    slices = slices_in(chunks, problem.lengths)

    def largest_first(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        return -int(tables.passes[pair[0]].forward_alloc[slices[pair[1]][0]]), pair

    return [sorted(product(stages, slices), key=largest_first) for stages in tables.stages_of]
