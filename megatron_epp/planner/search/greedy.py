"""Planners: each takes a problem, costs and options and returns its decisions. They differ in the tables they try."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import NamedTuple

from megatron_epp.cost import Costs
from megatron_epp.plan import UNLIMITED_BYTES, Chunk
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker, round_up, whole_sequences
from megatron_epp.planner.chunks.whole import plainly, tables_with_whole
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.memory.offload import timed
from megatron_epp.planner.mistakes import refuse_table
from megatron_epp.planner.orders.list_scheduling import Listing
from megatron_epp.planner.orders.split_weight import weights_apart
from megatron_epp.planner.orders.warm_up import Schedule, Stairs, elastic_1f1b
from megatron_epp.planner.problem import Options, Problem, require_straight, require_whole, validate
from megatron_epp.planner.search.local import improve
from megatron_epp.planner.search.trials import CLOSE, WORTH, Trials
from megatron_epp.planner.search.warm import Warm

Planner = Callable[[Problem, Costs, Options], Decisions]

CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Grains the search may try: total work cut into that many chunks per stage. Coarser leaves bubbles, finer costs overhead."""
MIDDLING = 12
"""Chunks per rank at which the search begins."""
HOSTED_PER_STAGE = (3, 6, 12, 24, 48)
"""Chunks per rank that are tried with KV offload."""
FIRST: tuple[Schedule, ...] = (Stairs(late=True, slope=2), Stairs(late=False, slope=2))
"""Schedules that every grain is tried with."""
SECOND: tuple[Schedule, ...] = (
    Stairs(late=True, slope=1.5),
    Stairs(late=True, slope=1),
    Stairs(late=False, slope=1.5),
    Stairs(late=False, slope=1),
    elastic_1f1b,
)
"""Further schedules for the best grain, and in `search.lockstep` for all grains when none fits: less alive, less slack."""
HALF = Stairs(late=True, slope=0.5)
LEAST: tuple[Schedule, ...] = (Stairs(late=True, slope=0),)
"""Schedule of last resort, when no other fits: one sequence is alive at a time, and no order of a table keeps less."""
LISTED = (Listing(2), Listing(1.5), Listing(1), Listing(3))
"""Schedules for any other placement than one stage per rank in order."""
FEW = 64
"""Largest number of sequences for which a table of whole sequences is tried in all warm-up windows."""
HANDFUL = 5
"""Largest number of sequences whose every order is tried with whole sequences, so that the order of the batch never matters."""
FAR = 0.87
"""Makespan with unlimited memory, as a share of the best, below which frugal orders are tried with offload."""
PATIENCE = 2
"""Grains in a row that may be no better before the search turns back."""


def greedy(problem: Problem, costs: Costs, options: Options, warm: Warm | None = None) -> Decisions:
    """Slice, pack, order in 1F1B with a warm-up window, recompute as needed; the least simulated makespan wins.

    The search is over the grain and the warm-up window. Whole sequences in 1F1B, longest first and shortest first, are always
    among the candidates where the token cap lets them, so the result is never slower than those. The order of the batch never
    matters. With `options.slices` there is one grain and nothing to search. With `warm` the search begins at the grain of a
    batch of like shape and ends sooner.

    Args:
        problem: the batch, the pipeline and its memory caps.
        costs: time and memory of every stage.
        options: the user's settings.
        warm: grains that earlier batches chose.

    Raises:
        InfeasibleError: no grain fits the memory caps.
    """
    return finished(candidates(problem, costs, options, warm), problem, costs, options)


class Candidates(NamedTuple):
    """Decisions with whole backwards that fit the caps.

    Attributes:
        best: the fastest of each kind; at least one.
        near: others that are hardly slower, one of which may be the fastest with weight gradients split off.
    """

    best: list[Decisions]
    near: list[Decisions]


def candidates(problem: Problem, costs: Costs, options: Options, warm: Warm | None = None) -> Candidates:
    """Search for the decisions that `greedy` finishes. Raises what it raises.

    Args:
        problem: the batch, the pipeline and its memory caps.
        costs: time and memory of every stage.
        options: the user's settings.
        warm: grains that earlier batches chose.
    """
    chunker, *others = Chunker.of(problem, costs, options.chunk_tokens).shapes
    trials = Trials(problem, costs, options)
    found = search_shape(trials, chunker, warm)
    for other in others:
        found += [one for one in search_shape(trials, other) if one not in found]
    if options.slices is None and max(problem.lengths) <= chunker.token_cap and problem.is_straight:
        plain = Trials(problem, costs, options)
        plain.best_us = trials.best_us
        for whole in plainly(problem.lengths):
            plain.better(whole, (elastic_1f1b,), close=0.0)
        found += [] if plain.best is None else [plain.best]
        trials.least_cap = min(filter(None, (trials.least_cap, plain.least_cap)), default=0)
    return Candidates(found or [trials.result()], trials.near)


def search_shape(trials: Trials, chunker: Chunker, warm: Warm | None = None) -> list[Decisions]:
    """Search the tables of a chunker, without copies and with them; the best of both, where there is any.

    Args:
        trials: the candidates, updated.
        chunker: the batch and its balance.
        warm: grains that earlier batches chose.
    """
    options, problem = trials.options, trials.problem
    if options.slices is not None:
        search_stairs(trials, chunker.table(chunker.grain(slices=options.slices)))
    else:
        search_grain(trials, chunker, warm)
        if trials.best is None:
            search_unsliced(trials)
    found = [] if trials.best is None else [trials.best]
    if options.offload and options.recompute == "auto" and math.isfinite(trials.costs.host_us(1)):
        if not problem.forward_only:
            search_copies(trials, chunker)
        elif trials.best is None:
            search_hosted(trials, chunker)
        found += [] if trials.best is None or trials.best in found else [trials.best]
    return found


def fastest(choices: Sequence[Decisions], problem: Problem, costs: Costs) -> Decisions:
    """Return the choice of least makespan, the first among equals."""
    if len(choices) == 1:
        return choices[0]
    return min(choices, key=lambda one: predicted_us(one, problem, costs))


def predicted_us(made: Decisions, problem: Problem, costs: Costs) -> float:
    """Makespan of the decisions, in microseconds."""
    tables = made.tables(problem, costs)
    return play(made.order, tables, made.layers, timed(made.beside, tables)).makespan_us


def search_stairs(trials: Trials, table: tuple[Chunk, ...]) -> None:
    """Try one table with all warm-up windows; the last one only when nothing else fits."""
    straight = trials.problem.is_straight
    trials.better(table, (*FIRST, *SECOND, HALF) if straight else LISTED)
    if trials.best is None:
        trials.better(table, LEAST if straight else (Listing(0),))


def search_copies(trials: Trials, chunker: Chunker) -> None:
    """Try offload with the tables and orders that would be best if memory did not matter, and with the best so far.

    If memory did not matter there would be no faster plan, so where the best so far is close to that nothing is tried.
    """
    free = Trials(
        replace(trials.problem, cap_bytes=(UNLIMITED_BYTES,) * trials.problem.num_ranks), trials.costs, trials.options
    )
    if trials.options.slices is None:
        tables = search_grain(free, chunker)
    else:
        tables = [chunker.table(chunker.grain(slices=trials.options.slices))]
        search_stairs(free, tables[0])
    if free.best_us >= WORTH * trials.best_us:
        return
    known = [*tables, *([] if trials.best is None else [trials.best.chunks])]
    schedules = [free.schedule, *(FIRST if trials.problem.is_straight else LISTED[:1])]
    for table in dict.fromkeys(known):
        trials.better_with_copies(table, list(dict.fromkeys(filter(None, schedules))))
    if free.best_us < WORTH * trials.best_us:
        search_hosted(trials, chunker)
    if free.best_us < FAR * trials.best_us and (trials.best is None or not trials.best.hosted):
        finest = chunker.table(chunker.grain(chunks=min(MOST_CHUNKS, trials.problem.num_ranks * CHUNKS_PER_STAGE[-1])))
        frugal: tuple[Schedule | Listing, ...] = (*SECOND, HALF, *LEAST) if trials.problem.is_straight else LISTED[1:]
        for table in dict.fromkeys([*tables, finest]):
            trials.better_with_copies(table, frugal)


def search_hosted(trials: Trials, chunker: Chunker) -> None:
    """Try KV offload with slices of several lengths: short ones compute too little to hide the transfer of keys and values."""
    problem = trials.problem
    if not trials.options.hosting:
        return
    counts = [problem.num_ranks * share for share in HOSTED_PER_STAGE]
    fixed = trials.options.slices
    grains = [chunker.grain(chunks=count) for count in counts] if fixed is None else [chunker.grain(slices=fixed)]
    tables = [chunker.evener(grain).table(grain) for grain in grains]
    roomy: Schedule | Listing = FIRST[0] if problem.is_straight else LISTED[0]
    least: Schedule | Listing = LEAST[0] if problem.is_straight else Listing(0)
    for schedule in (roomy, least):
        for table in dict.fromkeys(tables):
            trials.better_hosted(table, schedule)
        if trials.best is not None:
            break


def search_unsliced(trials: Trials) -> None:
    """Try tables in which the longest sequences run whole: with ranks that never starve, and if need be with least alive."""
    problem = trials.problem
    tables = list(tables_with_whole(problem, trials.costs, trials.options.chunk_tokens))
    roomy: tuple[Schedule | Listing, ...] = (*FIRST, *LISTED) if problem.is_straight else LISTED
    least: tuple[Schedule | Listing, ...] = (*LEAST, Listing(0)) if problem.is_straight else (Listing(0),)
    for schedules in (roomy, least):
        for table in tables if trials.best is None else ():
            trials.better(table, schedules)


def search_grain(trials: Trials, chunker: Chunker, warm: Warm | None = None) -> list[tuple[Chunk, ...]]:
    """Walk to finer tables and to coarser ones until they get no better; then try further warm-up windows for the best.

    Returns:
        The best table and the next finer ones.
    """
    problem = trials.problem
    counts = grain_counts(problem.num_ranks, chunker.coarsest)
    first: Sequence[Schedule | Listing] = FIRST if problem.is_straight else LISTED[:1]
    second: Sequence[Schedule | Listing] = (*SECOND, HALF) if problem.is_straight else LISTED[1:]
    hint = warm.recall(problem) if warm is not None else None
    start = counts.index(hint) if hint in counts else first_grain(counts, problem.num_ranks)
    patience = 1 if hint in counts else PATIENCE
    tables: dict[float, tuple[Chunk, ...]] = {}
    for walk in (counts[start:], counts[start - 1 :: -1] if start else []):
        worse = 0
        for count in walk:
            tables[count] = chunker.table(chunker.grain(chunks=count))
            worse = 0 if trials.better(tables[count], first) else worse + 1
            if worse == patience:
                break
    if trials.best is not None:
        trials.better(trials.best.chunks, second)
    if chunker.is_even:
        trials.better(chunker.table(chunker.grain(slices=1)), (*first, *second), close=0.0)
    for count in counts if trials.best is None else ():
        tables[count] = chunker.table(chunker.grain(chunks=count))
        trials.better(tables[count], LEAST if problem.is_straight else (Listing(0),))
        if trials.best is not None and trials.best.chunks == tables[count]:
            trials.better(tables[count], second)
    if max(problem.lengths) <= chunker.token_cap and len(problem.lengths) <= FEW and problem.is_straight:
        longest_first = plainly(problem.lengths)[0]
        trials.better(longest_first, (elastic_1f1b, *FIRST, *SECOND))
        for whole in permutations(longest_first) if len(problem.lengths) <= HANDFUL else ():
            trials.better(whole, (elastic_1f1b,), close=0.0)
    best = trials.best.chunks if trials.best is not None else ()
    at = next((counts.index(count) for count, table in tables.items() if table == best), start)
    if warm is not None:
        warm.remember(problem, counts[at])
    return [tables.get(count) or chunker.table(chunker.grain(chunks=count)) for count in counts[at : at + 3]]


def grain_counts(num_ranks: int, coarsest: float) -> list[float]:
    """Chunks in all to aim at, rising. Of those below which only the token cap counts (`Chunker.coarsest`) there is one."""
    counts = [count for share in CHUNKS_PER_STAGE if (count := num_ranks * share) <= MOST_CHUNKS]
    return counts[max(0, bisect_left(counts, coarsest) - 1) :]


def first_grain(counts: Sequence[float], num_ranks: int) -> int:
    """Index in `counts` at which the search begins."""
    return min(bisect_left(counts, MIDDLING * num_ranks), len(counts) - 1)


def finished(found: Candidates, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Local search; then weight gradients split off where that is asked for, the costs tell them apart and it is faster.

    The search knows whole backwards only, and the order that is fastest with these need not be so with weight gradients of
    their own. So those of the first decisions, and of the candidates near them, are split off too.
    """
    better = [improve(one, one.tables(problem, costs), problem, options) for one in found.best]
    if not splits(problem, costs, options):
        return fastest(better, problem, costs)
    others = [one for one in (*found.best, *found.near) if one not in better]
    best, best_us = better[0], math.inf
    for one in (*better, *others):
        tables = one.tables(problem, costs)
        enough_us = lower_bound_us(tables, one.chunks, problem, options) * (1 + CLOSE)
        if best_us <= enough_us:
            continue
        split = replace(one, order=weights_apart(one.order, tables, one.beside, problem.cap_bytes, enough_us))
        if (took_us := predicted_us(split, problem, costs)) < best_us:
            best, best_us = split, took_us
    return best


def splits(problem: Problem, costs: Costs, options: Options) -> bool:
    """Return True if weight gradients may be split off as actions of their own.

    Args:
        problem: the batch; evaluations have no weight gradients.
        costs: tell the weight gradient from the backward, or not.
        options: the user's settings.
    """
    return options.split_weight and costs.splits_weight and not problem.forward_only


def for_table(chunks: tuple[Chunk, ...], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The best order and recompute found for a given chunk table.

    Args:
        chunks: the table in forward order: slices of a sequence stand together, ascending.
        problem, costs, options: as `plan` takes them; what `options` says of slicing and packing is ignored.

    Raises:
        InfeasibleError: nothing that was tried fits the caps.
        PlanError: the arguments make no sense, or the chunks are no such table.
    """
    validate(problem, costs, options)
    refuse_table(Decisions(chunks, (), []), problem, costs, options.planner)
    trials = Trials(problem, costs, options)
    search_stairs(trials, chunks)
    return finished(Candidates([trials.result()], trials.near), problem, costs, options)


def baseline(schedule: Schedule) -> Planner:
    """A planner for whole sequences, one per chunk in batch order.

    It ignores `slices`, and refuses `chunk_tokens` below the longest.
    """

    def planner(problem: Problem, costs: Costs, options: Options) -> Decisions:
        require_straight(problem, options)
        require_whole(problem, options, round_up(max(problem.lengths), problem.token_multiple))
        trials = Trials(problem, costs, options)
        trials.better(whole_sequences(problem.lengths), (schedule,))
        return trials.result(options.planner)

    return planner


PLANNERS: dict[str, Planner] = {"greedy": greedy, "1f1b": baseline(elastic_1f1b)}
"""Planners by name. A new order of whole sequences is a function (see `Schedule`) and an entry, `baseline(it)`. A planner that
cuts its own chunks is a function too: docs/your-own-schedule.md.
"""
