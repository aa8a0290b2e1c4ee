"""Phases of the search: chunk tables without offload, then other sequences first, then offload."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS
from megatron_epp.planner.chunks.variants import started, tables_with_whole
from megatron_epp.planner.search.grains import (
    CHUNKS_PER_STAGE,
    PATIENCE,
    grain_counts,
    present,
    search_orders,
    search_tables,
    walk_further,
    whole_may_fit,
)
from megatron_epp.planner.search.order_rules import LEAST_LISTED, ROOMY_LISTED
from megatron_epp.planner.search.recent import Warm
from megatron_epp.planner.search.replicas import Chunkers
from megatron_epp.planner.search.trials import WORTH, Candidate, Trials

DISTANT = 1.02
"""Makespan, as a multiple of its bound, above which sequences are tried in other orders. With 1.005 no plan of 70 changes; with
1.1 two are slower, by up to 7 %, for 4 % less work (see `grains`).
"""
FAR = 0.87
"""Makespan with unlimited memory, as a share of the best, below which frugal orders are tried with offload."""
KV_OFFLOAD_PER_STAGE = (3, 6, 12, 24, 48)
"""Chunks per rank that are tried with KV offload."""


def search(trials: Trials, warm: Warm | None = None) -> list[Candidate]:
    """Search the tables of all chunkers; the best of each, without copies and with them.

    Args:
        trials: the candidates, updated.
        warm: grains that earlier batches of one replica chose.
    """
    found: list[Candidate] = []
    for chunkers in trials.replicas.shapes():
        found += [one for one in _search_shape(trials, chunkers, warm) if one not in found]
        warm = None
    return found


def _search_shape(trials: Trials, chunkers: Chunkers, warm: Warm | None) -> list[Candidate]:
    options = trials.replicas.options
    search_tables(trials, chunkers, warm)
    before = trials.best
    _search_starts(trials, chunkers)
    if trials.best is None and options.slices is None and not trials.replicas.is_lockstep:
        _search_unsliced(trials)
    found = [] if trials.best is None else [trials.best]
    found += [] if before is None or before in found else [before]
    if trials.replicas.can_offload:
        if not trials.problem.forward_only:
            _search_copies(trials, chunkers)
        elif trials.best is None:
            _search_kv_offload(trials, chunkers, math.inf)
        found += [] if trials.best is None or trials.best in found else [trials.best]
    return found


def search_table(trials: Trials, table: Aligned) -> list[Candidate]:
    """Try one table with all rules; return the best without offload of activations and the best with it, if that is faster."""
    search_orders(trials, table)
    found = [] if trials.best is None else [trials.best]
    if trials.replicas.can_offload and not trials.problem.forward_only:
        free = Trials(trials.replicas.without_caps)
        search_orders(free, table)
        if free.best is not None and free.best_us < WORTH * trials.best_us:
            trials.better_with_copies(table, (free.best.rule, *trials.rules.first, *trials.rules.second))
        found += [] if trials.best is None or trials.best in found else [trials.best]
    return found


def _search_starts(trials: Trials, chunkers: Chunkers) -> None:
    """Try the best table with other sequences first, and windows that the caps limit, if it is far from its bound; and if that
    is not enough, the next coarser table, whose longer chunks need fewer alive to fill the same wait.

    Before the first backward of a long sequence, its last slice has to pass all ranks and come back. With nothing else to run
    they wait. Chunks that have run forward before give them backwards to run, and a larger window gives them forwards. What a
    larger window holds too much is given up by recompute, so with a fixed recompute nothing is tried.
    """
    best, problem, options = trials.best, trials.problem, trials.replicas.options
    is_fixed = options.recompute != "auto" or not options.wide_windows
    if best is None or is_fixed or not problem.has_one_stage_per_rank or problem.forward_only or trials.replicas.is_lockstep:
        return
    enough_us = DISTANT * trials.replicas.bound_us(best.tables, best.table)
    for table in (best.table, _coarser(best.table, trials, chunkers)):
        if table is None or trials.best_us <= enough_us:
            break
        (chunks,) = table.chunks
        for one in dict.fromkeys((chunks, *started(chunks, problem.num_ranks, problem.loss_groups))):
            trials.better(Aligned((one,)), trials.rules.capped)


def _coarser(table: Aligned, trials: Trials, chunkers: Chunkers) -> Aligned | None:
    """Return the next coarser table; None where there is none, or the user fixed the slices.

    Args:
        table: of one replica.
        trials, chunkers: as `search_tables` takes them.
    """
    if trials.replicas.options.slices is not None:
        return None
    (chunks,) = table.chunks
    counts = grain_counts(trials.problem.num_ranks, chunkers.coarsest)
    for count in reversed(counts[: bisect_left(counts, len(chunks))]):
        found = present(chunkers.table(chunks=count))
        if len(found.chunks[0]) < len(chunks):
            return found
    return None


def _search_unsliced(trials: Trials) -> None:
    """Try tables in which the longest sequences run whole: in orders that keep ranks busy, then with least alive."""
    replicas, rules = trials.replicas, trials.rules
    if not whole_may_fit(trials):
        return
    whole = tables_with_whole(trials.problem, replicas.costs, replicas.options.chunk_tokens)
    tables = [Aligned((table,)) for table in whole]
    for tried in ((*rules.first, *ROOMY_LISTED), (*rules.least, *LEAST_LISTED)):
        for table in tables if trials.best is None else ():
            trials.better(table, dict.fromkeys(tried))


def _search_copies(trials: Trials, chunkers: Chunkers) -> None:
    """Try offload with the tables and orders that would be best if memory did not matter, and with the best so far.

    If memory did not matter there would be no faster plan, so where the best so far is close to that nothing is tried.
    """
    rules, best, is_lockstep = trials.rules, trials.best, trials.replicas.is_lockstep
    free = Trials(trials.replicas.without_caps)
    tables = search_tables(free, chunkers)
    if free.best is None or free.best_us >= WORTH * trials.best_us:
        return
    if is_lockstep:
        more = (*rules.first, *rules.second, *rules.least) if free.best_us < FAR * trials.best_us else rules.first
        for known in [free.best] if best is None else [free.best, best]:
            trials.better_with_copies(known.table, (known.rule, *more))
    else:
        for table in dict.fromkeys([*tables, *([] if best is None else [best.table])]):
            trials.better_with_copies(table, (free.best.rule, *rules.first))
        for _ in walk_further(trials, chunkers, PATIENCE, trials.better_with_copies):
            pass
    if free.best_us < WORTH * trials.best_us:
        _search_kv_offload(trials, chunkers, free.best_us / FAR)
    is_far = free.best_us < FAR * trials.best_us and (
        trials.best is None or not any(made.kv_offload for made in trials.best.made)
    )
    if is_far and not is_lockstep:
        if trials.replicas.options.slices is None:
            tables.append(present(chunkers.table(chunks=min(MOST_CHUNKS, trials.problem.num_ranks * CHUNKS_PER_STAGE[-1]))))
        for table in dict.fromkeys(tables):
            trials.better_with_copies(table, rules.frugal)


def _search_kv_offload(trials: Trials, chunkers: Chunkers, enough_us: float) -> None:
    """Try KV offload with slices of several lengths: short ones compute too little to hide the transfer of keys and values.

    Args:
        trials, chunkers: as `search_tables` takes them.
        enough_us: makespan up to which no order that keeps less is tried.
    """
    options, ranks = trials.replicas.options, trials.problem.num_ranks
    if not options.kv_offload:
        return
    tables: Iterable[Aligned | None]
    if options.slices is None:
        tables = [chunkers.table(chunks=ranks * share, even=True) for share in KV_OFFLOAD_PER_STAGE]
    else:
        tables = [chunkers.table(slices=options.slices, even=True)]
    for rule in (trials.rules.first[0], trials.rules.least[0]):
        for table in dict.fromkeys(tables):
            trials.better_with_kv_offload(table, rule)
        if trials.best is not None and trials.best_us <= enough_us:
            break
