"""KV offload: tables and plan entries where some keys and values are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_epp.cost.kv_costs import KVOffloadCosts
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import BoolColumn, ChunkWork, work_of
from megatron_epp.plan import Chunk, KVOffload
from megatron_epp.plan.kv_offload import slices_in
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import MODES
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
