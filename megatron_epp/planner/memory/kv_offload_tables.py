"""KV offload: tables and plan entries where some keys and values are in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np

from megatron_epp.cost.kv_costs import KVOffloadCosts
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import BoolColumn
from megatron_epp.plan import Chunk, KVOffload
from megatron_epp.plan.kv_offload import slices_in
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import MODES
from megatron_epp.planner.passes import StagePasses, passes_of
from megatron_epp.planner.tables import Tables, work_of_table

_work_of = lru_cache(maxsize=4)(work_of_table)  # of one table it is asked again and again
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
    work = _work_of(tuple(chunks), problem)
    slices, equal_stages = slices_in(chunks, problem.lengths, problem.borrowed), costs.equal_stages_of(work)
    passes, known = list(tables.passes), dict[tuple[int, frozenset[int]], StagePasses]()
    for stage in sorted({stage for stage, _ in pairs}):
        there, first_equal = frozenset(sequence for at, sequence in pairs if at == stage), equal_stages[stage]
        if (first_equal, there) not in known:
            bare, streams, which = work.offloading({sequence: slices[sequence] for sequence in there})
            own = passes_of(stage, bare, costs, modes, in_order, problem.forward_only)
            known[first_equal, there] = streamed(own, which, costs.kv_offload_costs(stage, streams, sharing))
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


def kv_offload_entries(chunks: Sequence[Chunk], problem: Problem, costs: Costs, pairs: Pairs) -> tuple[KVOffload, ...]:
    """List the plan's entries of KV offload: bytes of keys and values and of their gradient, by stage and sequence.

    Where sequences share prefixes, room for both is taken at once.
    """
    work, slices, entries = _work_of(tuple(chunks), problem), slices_in(chunks, problem.lengths, problem.borrowed), []
    sizes_of = cache(lambda stage, sequence: costs.kv_offload_costs(stage, work.offloading({sequence: slices[sequence]})[1]))
    for stage, sequence in sorted(pairs):
        sizes, c = sizes_of(costs.equal_stages[stage], sequence), slices[sequence][-1]
        cache_bytes, gradient = sizes.cache_bytes, sizes.gradient_bytes * (not problem.forward_only)
        both = (int((cache_bytes + gradient).sum()), 0) if problem.borrowed else (int(cache_bytes[c]), int(gradient[c]))
        entries.append(KVOffload(stage, sequence, *both))
    return tuple(entries)
