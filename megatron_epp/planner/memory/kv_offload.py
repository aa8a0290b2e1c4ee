"""KV offload: tables and plan entries where keys and values of some sequences and stages are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
from megatron_epp.cost.kv_cache import KVOffloadCosts
from megatron_epp.cost.work import BoolColumn
from megatron_epp.plan import Chunk, KVOffload
from megatron_epp.plan.recompute import MODES
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
    "backward_residual",
    "split_layer_peak",
)
_FRONTIER_COLUMNS = "mode", "saved", "layer_us", "fuller"
SHARING = 2.0
"""Factor by which the link slows down for KV offload and for copies of activations each, where a plan has both."""


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
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    bare = tabulate(chunks, problem, costs, modes, in_order, without_caches(work))
    found = _kv_offload_costs(costs, work, pairs, sharing)
    slices = [chunk.slice_of(problem.lengths) for chunk in chunks]
    attending = {position for position, mode in enumerate(MODES.values()) if mode.repeats_attention}
    items = [(s, c) for s in found for c, part in enumerate(slices) if part is not None and (s, part.sequence) in pairs]
    rows: dict[str, Any] = {}
    for name in _ROWS:
        rows[name] = _merged(getattr(tables, name), getattr(bare, name), items)
    frontier = []
    for frontier_step, other in zip(tables.frontier, bare.frontier, strict=True):
        frontier.append(
            replace(
                frontier_step,
                **{name: _merged(getattr(frontier_step, name), getattr(other, name), items) for name in _FRONTIER_COLUMNS},
            )
        )
    for s, c in items:
        host = found[s]
        rows["forward_us"][s][c] += float(host.forward_us[c])
        rows["forward_alloc"][s][c] += int(host.forward_bytes[c])
        rows["forward_free"][s][c] += int(host.forward_bytes[c])
        if problem.forward_only:
            continue
        rows["backward_us"][s][c] += float(host.backward_us[c])
        rows["backward_constant"][s][c] = int(host.backward_bytes[c])
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


def _merged(rows: Any, others: Any, items: Sequence[tuple[int, int]]) -> Any:
    """Merge rows: the listed entries come from `others`. Rows that stages share are copied first.

    Args:
        rows: ``[stage][chunk]``.
        others: rows of the same shape.
        items: stage and chunk of the entries to replace.
    """
    stages = {stage for stage, _ in items}
    merged = [list(row) if stage in stages else row for stage, row in enumerate(rows)]
    for stage, c in items if merged else ():
        merged[stage][c] = others[stage][c]
    return merged


def _kv_offload_costs(costs: Costs, work: ChunkWork, pairs: Pairs, sharing: float = 1.0) -> dict[int, KVOffloadCosts]:
    """Compute the costs of KV offload for every stage that has any, in stage order; equal stages are evaluated once."""
    equal_stages, stages = costs.equal_stages, sorted({stage for stage, _ in pairs})
    distinct = {first: costs.kv_offload_costs(first, work, sharing) for first in {equal_stages[stage] for stage in stages}}
    return {stage: distinct[equal_stages[stage]] for stage in stages}


def kv_offload_entries(chunks: Sequence[Chunk], problem: Problem, costs: Costs, pairs: Pairs) -> tuple[KVOffload, ...]:
    """List the plan's entries of KV offload: bytes of keys and values and of their gradient, by stage and sequence.

    Args:
        chunks: the chunk table.
        problem: the batch.
        costs: time and memory of every stage.
        pairs: stages and sequences whose keys and values are in host memory.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    slices = [chunk.slice_of(problem.lengths) for chunk in chunks]
    chunk_of = {part.sequence: c for c, part in enumerate(slices) if part is not None}
    found, entries = _kv_offload_costs(costs, work, pairs), []
    for stage, sequence in sorted(pairs):
        sizes, c = found[stage], chunk_of[sequence]
        gradient = 0 if problem.forward_only else int(sizes.gradient_bytes[c])
        entries.append(KVOffload(stage, sequence, int(sizes.cache_bytes[c]), gradient))
    return tuple(entries)
