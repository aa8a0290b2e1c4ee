"""Search over chunk tables: from coarse grains to fine ones, each in several orders, without offload.

No paper has the numbers here and in `passes`, `trials`, `greedy` and `local`. Next to them is what other values did to plans of
70 small random problems under caps: of the campaign (`docs/testing.md`), from seeds below 375, without the slowest to plan,
on 2026-11-25. `python -m scripts.bench.planner` measures larger batches.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker, whole_sequences
from megatron_epp.planner.chunks.variants import by_length
from megatron_epp.planner.order import arranged
from megatron_epp.planner.orders.patterns import is_v
from megatron_epp.planner.orders.warm_up import OrderRule
from megatron_epp.planner.search.order_rules import ELASTIC_1F1B, FIRST, SECOND
from megatron_epp.planner.search.recent import Warm
from megatron_epp.planner.search.replicas import Chunkers
from megatron_epp.planner.search.trials import Trials

CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Grains the search may try: total work cut into that many chunks per stage. Coarser leaves bubbles, finer costs overhead."""
MIDDLING = 12
"""Chunks per rank at which the search begins. With 4 one plan of 70 faster by 0.01 %; with 32 one slower by 0.1 %, for 13 %
more work.
"""
FEW = 64
"""Largest number of sequences for which a table of whole sequences is tried in all warm-up windows. Not measured: each sequence
is a chunk, and more chunks take longer to order.
"""
HANDFUL = 5
"""Largest number of sequences whose every order is tried with whole sequences, so that the order of the batch never matters:
120 orders at most, where one more sequence would make 720.
"""
SERIAL = 1.5
"""Multiple of its lower bound that a coarse table takes at the least, as a rule, with one sequence alive at a time. With 1 no
plan of 70 changes; with 3 one is slower, by 18 %.
"""
PATIENCE = 2
"""Grains in a row that may be no better before the search turns back. With 1 or 4 no plan of 70 changes, for 2 % less or 5 %
more work.
"""


def search_tables(trials: Trials, chunkers: Chunkers, warm: Warm | None = None) -> list[Aligned]:
    """Search without copies: all grains, or the one that the user fixed.

    Args:
        trials: the candidates, updated.
        chunkers: the batch and its balance.
        warm: grains that earlier batches chose.

    Returns:
        The best table and the next finer ones, behind slices of equal length where these are faster; in lockstep the best.
    """
    slices = trials.replicas.options.slices
    if trials.replicas.is_lockstep:
        return _search_lockstep(trials, chunkers)
    if slices is None:
        return _search_grain(trials, chunkers, warm)
    table = present(chunkers.table(slices=slices))
    search_orders(trials, table)
    return [table]


def search_orders(trials: Trials, table: Aligned | None) -> None:
    """Try one table with all rules until one is proven best.

    Rules of last resort are tried even where others fit: what is found under a cap has to be found under a larger one.
    """
    trials.better(table, (*trials.rules.first, *trials.rules.second, *trials.rules.least), close=0.0)


def _search_grain(trials: Trials, chunkers: Chunkers, warm: Warm | None) -> list[Aligned]:
    """Walk to finer tables and to coarser ones until they get no better; then try further rules for the best.

    Args:
        trials, chunkers, warm: as `search_tables` takes them.
    """
    problem = trials.problem
    counts = grain_counts(problem.num_ranks, chunkers.coarsest)
    hint = warm.recall(problem) if warm is not None else None
    start = counts.index(hint) if hint in counts else first_grain(counts, problem.num_ranks)
    patience = 1 if hint in counts else PATIENCE
    tables = dict(_walk(chunkers, counts, start, patience, partial(_with_first_rules, trials)))
    _refine(trials, chunkers)
    if trials.is_split or is_v(problem):
        tables |= dict(walk_further(trials, chunkers, patience, trials.better))
    usual = None if trials.best is None else trials.best.table
    _search_equal(trials, chunkers.each[0])
    equal = [trials.best.table] if trials.best is not None and trials.best.table != usual else []
    _search_least(trials, chunkers, counts, tables)
    is_few = len(problem.lengths) <= FEW and problem.has_one_stage_per_rank
    if is_few and max(problem.lengths) <= chunkers.each[0].token_cap and whole_may_fit(trials):
        longest_first = by_length(problem)[0]
        trials.better(Aligned((longest_first,)), (ELASTIC_1F1B, *FIRST, *SECOND))
        # The bound is the same for every order.
        if len(problem.lengths) <= HANDFUL and trials.may_be_better(Aligned((longest_first,))):
            for whole in permutations(longest_first):
                trials.better(Aligned((arranged(whole, problem.loss_groups),)), (ELASTIC_1F1B,), close=0.0)
    best = None if trials.best is None else usual if [trials.best.table] == equal else trials.best.table
    at = next((counts.index(count) for count, table in tables.items() if table == best), start)
    if warm is not None:
        warm.remember(problem, counts[at])
    return [*equal, *(tables.get(count) or present(chunkers.table(chunks=count)) for count in counts[at : at + 3])]


def _search_equal(trials: Trials, chunker: Chunker) -> None:
    """Try slices of equal length, about as many as the best table has, then more and fewer until they get no better.

    Their number is a multiple of the ranks, so that the slices of a sequence take turns on a rank's stages without a gap.
    """
    if not trials.rules.equal or trials.best is None:
        return
    problem, ranks, rules = trials.problem, trials.problem.num_ranks, (*trials.rules.equal, *trials.rules.first)
    longest = max(range(len(problem.lengths)), key=problem.lengths.__getitem__)
    slices = sum(s.sequence == longest for chunk in trials.best.table.chunks[0] for s in chunk.segments)
    least = -(-problem.lengths[longest] // chunker.token_cap)
    most = min(-(-problem.lengths[longest] // problem.token_multiple), MOST_CHUNKS)
    start = max(1, round(slices / ranks), -(-least // ranks))
    for way in (itertools.count(start), range(start - 1, 0, -1)):
        for share in way:
            is_allowed = least <= share * ranks <= most
            if not is_allowed or not trials.better(Aligned((chunker.equal_table(share * ranks),)), rules):
                break


def _search_least(trials: Trials, chunkers: Chunkers, counts: Sequence[float], tables: dict[float, Aligned]) -> None:
    """Try orders that keep little, with which coarse tables may fit that are faster than finer ones.

    All grains are tried while nothing fits, or if recompute is fixed; then the coarser ones are tried in all windows, since
    recompute makes no room for wide ones. Otherwise, if the best recomputes, coarser grains are tried as long as they have so
    much less work that a pipeline with one sequence alive at a time may be faster.

    Args:
        trials, chunkers: as `search_tables` takes them.
        counts: chunks in all to aim at, rising.
        tables: tables tried so far, by count; updated.
    """
    best = trials.near[0] if trials.near else trials.best
    is_fixed = trials.replicas.options.recompute != "auto"
    is_tight = best is not None and any(map(any, best.only.recompute_steps))
    for count in counts:
        if best is not None and not is_fixed and (not is_tight or count >= len(best.table)):
            break
        tables[count] = present(chunkers.table(chunks=count))
        if best is not None and not is_fixed and not trials.may_be_better(tables[count], SERIAL):
            break
        is_coarser = best is not None and is_fixed and count < len(best.table)
        trials.better(tables[count], (*(trials.rules.second if is_coarser else ()), *trials.rules.least))
        if trials.best is not None and trials.best.table == tables[count]:
            trials.better(tables[count], trials.rules.second)


def _search_lockstep(trials: Trials, chunkers: Chunkers) -> list[Aligned]:
    """Search grains in the same way as for one replica, or try only the grain that the user fixed.

    If nothing fits, these grains are tried with further rules, and then coarser grains, since a replica may have too few tokens
    for them.
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
    """Try grains from `start` to finer ones, then to coarser ones, until they get no better; yield the grains tried.

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
    """Try a grain; True if it is better than all before."""
    is_better = trials.better(table, trials.rules.first)
    return trials.better(table, trials.narrow(table)) or is_better if trials.rules.narrow else is_better


def _refine(trials: Trials, chunkers: Chunkers) -> None:
    """Try chunks as long as the longest sequence, or as the token cap allows where it binds, and the best, with all rules."""
    rules = (*trials.rules.first, *trials.rules.second)
    if chunkers.is_even:
        trials.better(chunkers.table(slices=1), rules, close=0.0)
    elif trials.best is not None and not trials.replicas.is_lockstep:  # otherwise whole sequences have a search of their own
        trials.better(chunkers.table(slices=1), rules)
    if trials.best is not None:
        trials.better(trials.best.table, trials.rules.second)


def whole_bytes(trials: Trials) -> int:
    """Compute the bytes that the longest sequence needs alone, in one chunk: a table in which it runs whole needs no less."""
    problem = trials.problem
    longest = max(range(len(problem.lengths)), key=problem.lengths.__getitem__)
    alone = replace(problem.part((longest,)), cap_bytes=(1,) * problem.num_ranks)
    own = Trials(replace(trials.replicas, problems=(alone,)))
    own.better(Aligned((whole_sequences(alone.lengths),)), trials.rules.least)
    return own.least_cap


def whole_may_fit(trials: Trials) -> bool:
    """True if the longest sequence may run whole under the caps, or under the smallest cap known to suffice."""
    return whole_bytes(trials) < max(trials.least_cap, 1 + max(trials.problem.cap_bytes))


def walk_further(
    trials: Trials, chunkers: Chunkers, patience: int, try_rules: Callable[[Aligned, Sequence[OrderRule]], bool]
) -> Iterator[tuple[float, Aligned]]:
    """Try `OrderRules.walked` for the best table, then for finer and coarser ones until they get no better; yield the grains.

    With slices that the user fixed there is one table.

    Args:
        trials, chunkers: as `search_tables` takes them.
        patience: as `_walk` takes it.
        try_rules: tries a table in several orders; returns True if one is better.
    """
    rules, best = trials.rules.walked, trials.best
    if not rules or best is None:
        return
    if trials.replicas.options.slices is not None:
        try_rules(best.table, rules)
        return
    counts = grain_counts(trials.problem.num_ranks, chunkers.coarsest)
    start = bisect_left(counts, len(best.table))
    yield from _walk(chunkers, counts, start, patience, lambda table: try_rules(table, rules))


def grain_counts(num_ranks: int, coarsest: float) -> list[float]:
    """Numbers of chunks to aim at, rising; at most one below `Chunker.coarsest`, where the token cap alone decides."""
    counts = [count for share in CHUNKS_PER_STAGE if (count := num_ranks * share) <= MOST_CHUNKS]
    return counts[max(0, bisect_left(counts, coarsest) - 1) :]


def first_grain(counts: Sequence[float], num_ranks: int) -> int:
    """Index in `counts` at which the search begins."""
    return min(bisect_left(counts, MIDDLING * num_ranks), len(counts) - 1)


def present(table: Aligned | None) -> Aligned:
    """Return the table of one replica, of which there always is one."""
    assert table is not None
    return table
