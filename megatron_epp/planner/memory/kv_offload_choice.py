"""Greedy choice of KV offload: the pairs that it takes to fit, and those that avoid recompute."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Action, Chunk
from megatron_epp.plan.kv_offload import kv_offload_changes, slices_in
from megatron_epp.planner.kernels.columns import encode
from megatron_epp.planner.memory.kv_offload import Pairs, kv_offload_entries, with_kv_offload
from megatron_epp.planner.memory.recompute import least_peaks, peaks_bytes
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


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
        tables: without KV offload.
        chunks, problem, costs, modes, in_order: the arguments from which `tables` were made.

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
        chunks: the chunk table.
        problem: the batch.
        costs: time and memory of every stage.
        pairs: stages and sequences whose keys and values are in host memory.
    """
    entries = kv_offload_entries(chunks, problem, costs, pairs)
    comes: dict[Action, int] = {}
    goes: dict[Action, int] = {}
    for action, at_end, size in kv_offload_changes(entries, slices_in(chunks, problem.lengths), problem.forward_only):
        changes = goes if at_end else comes
        changes[action] = changes.get(action, 0) + size
    peaks = []
    for actions in order:
        now = most = 0
        for action in actions:
            now += comes.get(action, 0)
            most = max(most, now)
            now += goes.get(action, 0)
        peaks.append(most)
    return peaks


def _sizes(tables: Tables, chunks: Sequence[Chunk], problem: Problem) -> list[list[tuple[int, int]]]:
    """List, for every rank, the stages and sequences open to KV offload, largest cache first."""
    found = []
    slices = slices_in(chunks, problem.lengths)
    for stages in tables.stages_of:
        pairs = [(stage, sequence) for stage in stages for sequence in slices]
        found.append(sorted(pairs, key=lambda pair: (-tables.forward_alloc[pair[0]][slices[pair[1]][0]], pair)))
    return found
