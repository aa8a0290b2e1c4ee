"""Search over chunk tables: from coarse grains to fine ones, each in several orders, without copies and with them.

The numbers here and in `trials` were set by hand; no paper has them. `python -m scripts.bench.planner` measures a change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, whole_sequences
from megatron_epp.planner.chunks.variants import by_length, started, tables_with_whole
from megatron_epp.planner.orders.warm_up import OrderRule
from megatron_epp.planner.search.order_rules import ELASTIC_1F1B, FIRST, LEAST_LISTED, ROOMY_LISTED, SECOND
from megatron_epp.planner.search.recent import Warm
from megatron_epp.planner.search.replicas import Chunkers
from megatron_epp.planner.search.trials import WORTH, Candidate, Trials

CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Grains the search may try: total work cut into that many chunks per stage. Coarser leaves bubbles, finer costs overhead."""
MIDDLING = 12
"""Chunks per rank at which the search begins."""
KV_OFFLOAD_PER_STAGE = (3, 6, 12, 24, 48)
"""Chunks per rank that are tried with KV offload."""
FEW = 64
"""Largest number of sequences for which a table of whole sequences is tried in all warm-up windows."""
HANDFUL = 5
"""Largest number of sequences whose every order is tried with whole sequences, so that the order of the batch never matters."""
DISTANT = 1.02
"""Makespan, as a multiple of its bound, above which sequences are tried in other orders."""
FAR = 0.87
"""Makespan with unlimited memory, as a share of the best, below which frugal orders are tried with offload."""
PATIENCE = 2
"""Grains in a row that may be no better before the search turns back."""


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
            _search_kv_offload(trials, chunkers)
        found += [] if trials.best is None or trials.best in found else [trials.best]
    return found


def search_tables(trials: Trials, chunkers: Chunkers, warm: Warm | None = None) -> list[Aligned]:
    """Search without copies: all grains, or the one that the user fixed.

    Args:
        trials: the candidates, updated.
        chunkers: the batch and its balance.
        warm: grains that earlier batches chose.

    Returns:
        The best table and the next finer ones; in lockstep the best.
    """
    slices = trials.replicas.options.slices
    if trials.replicas.is_lockstep:
        return _search_lockstep(trials, chunkers)
    if slices is None:
        return _search_grain(trials, chunkers, warm)
    table = _present(chunkers.table(slices=slices))
    search_orders(trials, table)
    return [table]


def search_orders(trials: Trials, table: Aligned | None) -> None:
    """Try one table with all rules until one is proven best.

    Those of last resort are tried where others fit, too: what is found under a cap has to be found under a larger one.
    """
    trials.better(table, (*trials.rules.first, *trials.rules.second, *trials.rules.least), close=0.0)


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


def _search_grain(trials: Trials, chunkers: Chunkers, warm: Warm | None) -> list[Aligned]:
    """Walk to finer tables and to coarser ones until they get no better; then try further rules for the best.

    Args:
        trials, chunkers, warm: as for `search_tables`.
    """
    problem, rules = trials.problem, trials.rules
    counts = grain_counts(problem.num_ranks, chunkers.coarsest)
    hint = warm.recall(problem) if warm is not None else None
    start = counts.index(hint) if hint in counts else first_grain(counts, problem.num_ranks)
    patience = 1 if hint in counts else PATIENCE
    tables = dict(_walk(chunkers, counts, start, patience, partial(_with_first_rules, trials)))
    _refine(trials, chunkers)
    if trials.is_split:
        tables |= dict(_walk_even(trials, chunkers, patience, trials.better))
    # With a fixed recompute only an order that keeps little lets coarse tables fit, which may be faster than finer ones.
    for count in counts if trials.best is None or trials.replicas.options.recompute != "auto" else ():
        tables[count] = _present(chunkers.table(chunks=count))
        trials.better(tables[count], rules.least)
        if trials.best is not None and trials.best.table == tables[count]:
            trials.better(tables[count], rules.second)
    is_few = len(problem.lengths) <= FEW and problem.has_one_stage_per_rank
    if is_few and max(problem.lengths) <= chunkers.each[0].token_cap and _whole_may_fit(trials):
        longest_first = by_length(problem.lengths)[0]
        trials.better(Aligned((longest_first,)), (ELASTIC_1F1B, *FIRST, *SECOND))
        # The bound is the same for every order.
        if len(problem.lengths) <= HANDFUL and trials.may_be_better(Aligned((longest_first,))):
            for whole in permutations(longest_first):
                trials.better(Aligned((whole,)), (ELASTIC_1F1B,), close=0.0)
    best = None if trials.best is None else trials.best.table
    at = next((counts.index(count) for count, table in tables.items() if table == best), start)
    if warm is not None:
        warm.remember(problem, counts[at])
    return [tables.get(count) or _present(chunkers.table(chunks=count)) for count in counts[at : at + 3]]


def _search_lockstep(trials: Trials, chunkers: Chunkers) -> list[Aligned]:
    """Search grains as for one replica, or try only the grain that the user fixed.

    When nothing fits then, these grains are tried with further rules, and then coarser ones, for a replica may have too few
    tokens for them.
    """
    ranks, slices = trials.problem.num_ranks, trials.replicas.options.slices
    usual: list[Aligned | None]
    coarser: Iterator[Aligned | None]
    if slices is not None:
        usual = [chunkers.table(slices=slices)]
        search_orders(trials, usual[0])
        coarser = (chunkers.table(slices=fewer) for fewer in range(slices - 1, 0, -1))
    else:
        counts = grain_counts(ranks, chunkers.coarsest)
        start = first_grain(counts, ranks)
        for _ in _walk(chunkers, counts, start, PATIENCE, partial(_with_first_rules, trials)):
            pass
        usual = []
        if trials.best is None:
            usual = [chunkers.table(chunks=count) for count in (*counts[start:], *counts[:start][::-1])]
        coarser = (chunkers.table(chunks=fewer) for fewer in range(ranks - 1, 0, -1))
    _refine(trials, chunkers)
    if trials.best is None:
        rules = (*trials.rules.second, *trials.rules.least)
        for table in usual:
            trials.better(table, rules)
        for table in coarser:
            if trials.better(table, rules):
                break
    return [] if trials.best is None else [trials.best.table]


def _walk(
    chunkers: Chunkers, counts: Sequence[float], start: int, patience: int, is_better: Callable[[Aligned], bool]
) -> Iterator[tuple[float, Aligned]]:
    """Try grains from `start` to finer ones, then to coarser ones, until they get no better, and yield those tried.

    Args:
        chunkers: the batch and its balance.
        counts: chunks in all to aim at, rising.
        start: where in `counts` to begin.
        patience: grains in a row that may be no better.
        is_better: tries a table.
    """
    seen: set[Aligned | None] = set()
    for way in (counts[start:], counts[:start][::-1]):
        worse = 0
        for count in way:
            table = chunkers.table(chunks=count)
            if table in seen:  # neither better nor worse: short sequences leave many grains with one table
                continue
            seen.add(table)
            worse = 0 if table is not None and is_better(table) else worse + 1
            if table is not None:
                yield count, table
            if worse == patience:
                break


def _with_first_rules(trials: Trials, table: Aligned) -> bool:
    """Try a grain; True if it is better than those before."""
    is_better = trials.better(table, trials.rules.first)
    return trials.better(table, trials.narrow(table)) or is_better if trials.rules.narrow else is_better


def _refine(trials: Trials, chunkers: Chunkers) -> None:
    """Try chunks as long as the longest sequence, or as the token cap allows where it binds; the best with further rules."""
    if chunkers.is_even:
        trials.better(chunkers.table(slices=1), (*trials.rules.first, *trials.rules.second), close=0.0)
    elif trials.best is not None and not trials.replicas.is_lockstep:  # otherwise whole sequences have a search of their own
        trials.better(chunkers.table(slices=1), trials.rules.first)
    if trials.best is not None:
        trials.better(trials.best.table, trials.rules.second)


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
        for one in dict.fromkeys((chunks, *started(chunks, problem.num_ranks))):
            trials.better(Aligned((one,)), trials.rules.capped)


def _coarser(table: Aligned, trials: Trials, chunkers: Chunkers) -> Aligned | None:
    """Return the next coarser table; None where there is none, or the user fixed the slices.

    Args:
        table: of one replica.
        trials, chunkers: as for `search_tables`.
    """
    if trials.replicas.options.slices is not None:
        return None
    (chunks,) = table.chunks
    counts = grain_counts(trials.problem.num_ranks, chunkers.coarsest)
    for count in reversed(counts[: bisect_left(counts, len(chunks))]):
        found = _present(chunkers.table(chunks=count))
        if len(found.chunks[0]) < len(chunks):
            return found
    return None


def _search_unsliced(trials: Trials) -> None:
    """Try tables in which the longest sequences run whole: in orders that keep ranks busy, then with least alive."""
    replicas, rules = trials.replicas, trials.rules
    if not _whole_may_fit(trials):
        return
    whole = tables_with_whole(trials.problem, replicas.costs, replicas.options.chunk_tokens)
    tables = [Aligned((table,)) for table in whole]
    for tried in ((*rules.first, *ROOMY_LISTED), (*rules.least, *LEAST_LISTED)):
        for table in tables if trials.best is None else ():
            trials.better(table, dict.fromkeys(tried))


def whole_bytes(trials: Trials) -> int:
    """Compute the bytes that the longest sequence needs alone, in one chunk: a table in which it runs whole needs no less."""
    problem = trials.problem
    longest = max(range(len(problem.lengths)), key=problem.lengths.__getitem__)
    alone = replace(problem.part((longest,)), cap_bytes=(1,) * problem.num_ranks)
    own = Trials(replace(trials.replicas, problems=(alone,)))
    own.better(Aligned((whole_sequences(alone.lengths),)), trials.rules.least)
    return own.least_cap


def _whole_may_fit(trials: Trials) -> bool:
    """True if the longest sequence may run whole under the caps, or under the smallest cap that is known to do."""
    return whole_bytes(trials) < max(trials.least_cap, 1 + max(trials.problem.cap_bytes))


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
        for _ in _walk_even(trials, chunkers, PATIENCE, trials.better_with_copies):
            pass
    if free.best_us < WORTH * trials.best_us:
        _search_kv_offload(trials, chunkers)
    is_far = free.best_us < FAR * trials.best_us and (
        trials.best is None or not any(made.kv_offload for made in trials.best.made)
    )
    if is_far and not is_lockstep:
        if trials.replicas.options.slices is None:
            tables.append(_present(chunkers.table(chunks=min(MOST_CHUNKS, trials.problem.num_ranks * CHUNKS_PER_STAGE[-1]))))
        for table in dict.fromkeys(tables):
            trials.better_with_copies(table, rules.frugal)


def _walk_even(
    trials: Trials, chunkers: Chunkers, patience: int, try_rules: Callable[[Aligned, Sequence[OrderRule]], bool]
) -> Iterator[tuple[float, Aligned]]:
    """Try even orders for the best table, then for finer and for coarser ones until they get no better, and yield those tried.

    With slices that the user fixed there is one table.

    Args:
        trials, chunkers: as for `search_tables`.
        patience: as for `_walk`.
        try_rules: tries a table in several orders; returns True if one is better.
    """
    rules, best = trials.rules.even, trials.best
    if not rules or best is None:
        return
    if trials.replicas.options.slices is not None:
        try_rules(best.table, rules)
        return
    counts = grain_counts(trials.problem.num_ranks, chunkers.coarsest)
    start = bisect_left(counts, len(best.table.skeleton))
    yield from _walk(chunkers, counts, start, patience, lambda table: try_rules(table, rules))


def _search_kv_offload(trials: Trials, chunkers: Chunkers) -> None:
    """Try KV offload with slices of several lengths: short ones compute too little to hide the transfer of keys and values."""
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
        if trials.best is not None:
            break


def grain_counts(num_ranks: int, coarsest: float) -> list[float]:
    """Chunks in all to aim at, rising. Of those below which only the token cap counts (`Chunker.coarsest`) there is one."""
    counts = [count for share in CHUNKS_PER_STAGE if (count := num_ranks * share) <= MOST_CHUNKS]
    return counts[max(0, bisect_left(counts, coarsest) - 1) :]


def first_grain(counts: Sequence[float], num_ranks: int) -> int:
    """Index in `counts` at which the search begins."""
    return min(bisect_left(counts, MIDDLING * num_ranks), len(counts) - 1)


def _present(table: Aligned | None) -> Aligned:
    """Return the table of one replica, of which there always is one."""
    assert table is not None
    return table
