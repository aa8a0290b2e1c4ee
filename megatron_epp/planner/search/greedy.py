"""The greedy planner, the same for a given chunk table, and 1F1B over whole sequences. Each returns its decisions.

`planner/README.md` tells the way of a batch through the planner by file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.chunker import Chunker, round_up, whole_sequences
from megatron_epp.planner.chunks.variants import by_length
from megatron_epp.planner.decisions import Decisions, Planner
from megatron_epp.planner.mistakes import refuse_table
from megatron_epp.planner.order import arranged
from megatron_epp.planner.orders.complete import completed
from megatron_epp.planner.orders.warm_up import OneStagePerRank, Schedule
from megatron_epp.planner.problem import Options, Problem, require_one_stage_per_rank, require_whole, validate
from megatron_epp.planner.search.finishing import finisher_of
from megatron_epp.planner.search.local import improve, searches
from megatron_epp.planner.search.order_rules import ELASTIC_1F1B, ROOMY_LISTED
from megatron_epp.planner.search.phases import search, search_table
from megatron_epp.planner.search.recent import Warm
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.search.trials import CLOSE, Candidate, Choice, Trials

SPLIT_PARTS = 16
"""Steps from the caps to the peaks of whole backwards with which weight gradients of fast orders are tried. With 8, plans were
slower with more memory by 1 % in places, since the steps passed over what was best under a smaller cap.
"""

STARTS = 3
"""Decisions from which local search with weight gradients split off starts. With 1 or 9 no plan of 70 changes (see `grains`).
"""

ENOUGH = 1.001
"""Multiple of the makespan with less memory set aside for messages up to which there is no further search. Local search and
completion come after it, from fewer starts. Not measured: more cuts more searches short that might find faster plans.
"""

FINISHED = 8
"""Candidates that a finisher (`finishing`) tries to improve, the fastest. With 2 no plan of 70 changes."""


class Earlier(NamedTuple):
    """Search for the same batch with less memory set aside for messages, whose candidates are tried before the next search.

    Attributes:
        choices: its fastest candidates.
        makespan_us: of the best of them.
        problem: what was asked for.
    """

    choices: Sequence[Choice]
    makespan_us: float
    problem: Problem

    def serves(self, problem: Problem) -> bool:
        """Return True if only the memory set aside for messages differs, of which there is more now."""
        is_same = replace(self.problem, message_bytes=problem.message_bytes) == problem
        return is_same and sum(self.problem.message_bytes) < sum(problem.message_bytes)


LastSearches = dict[Options, Earlier]
"""The last search with each set of options."""


def greedy(problem: Problem, costs: Costs, options: Options, before: LastSearches | None = None) -> Decisions:
    """Slice, pack, order in 1F1B with a warm-up window, recompute as needed; the least simulated makespan wins.

    The search is over the grain and the warm-up window. Whole sequences in 1F1B, longest first and shortest first, are always
    among the candidates where the token cap allows, so the result is never slower than they are. The order of the batch never
    matters. With `options.slices` there is one grain and nothing to search.

    Args:
        problem, costs, options: as `plan` takes them.
        before: earlier searches, whose fastest candidates are tried first; updated.

    Raises:
        InfeasibleError: no grain fits the memory caps.
    """
    made = _complete(candidates(problem, costs, options, before=before), problem, costs, options)
    if finisher_of(options) is None or not options.split_weight:
        return made
    # Orders that are fast with weight gradients split off may leave a finisher little to improve.
    return fastest([made, greedy(problem, costs, replace(options, split_weight=False), before)], problem, costs)


class Candidates(NamedTuple):
    """Decisions with whole backwards that fit the caps.

    Attributes:
        best: the fastest of each kind, from which local search starts; at least one.
        near: fast ones, best ones among them, with their complete orders where orders are completed.
        of_rules: the fastest of each order rule.
    """

    best: list[Decisions]
    near: list[Candidate]
    of_rules: Sequence[Candidate] = ()


def candidates(
    problem: Problem, costs: Costs, options: Options, warm: Warm | None = None, before: LastSearches | None = None
) -> Candidates:
    """Search for the decisions that `greedy` finishes. Raises what it raises.

    Args:
        problem, costs, options: as `greedy` takes them.
        warm: grains that earlier batches chose; the search begins at the grain of a batch of similar shape, and ends sooner.
        before: as `greedy` takes it. Where an earlier search's candidates are nearly as fast now, there is no further search.
    """
    replicas = Replicas((problem,), costs, options)
    trials, found = _searched(replicas, warm, {} if before is None else before)
    token_cap = Chunker.of(problem, costs, options.chunk_tokens).token_cap
    if options.slices is None and max(problem.lengths) <= token_cap and problem.has_one_stage_per_rank:
        plain = Trials(replicas)
        plain.best_us = trials.best_us
        for whole in by_length(problem):
            plain.better(Aligned((whole,)), (ELASTIC_1F1B,), close=0.0)
        found += [] if plain.best is None else [plain.best]
        trials.least_cap = min(filter(None, (trials.least_cap, plain.least_cap)), default=0)
    return _candidates(found or [trials.result()], trials)


def _searched(replicas: Replicas, warm: Warm | None, before: LastSearches) -> tuple[Trials, list[Candidate]]:
    """Search, unless candidates of an earlier search are nearly as fast now; return what was tried and the best of each kind.

    Args:
        replicas: of the problem.
        warm, before: as `candidates` takes them.
    """
    (problem,), options = replicas.problems, replicas.options
    earlier = before.get(options)
    choices = earlier.choices if earlier is not None and earlier.serves(problem) else ()
    trials = Trials(replicas)
    again = trials.retry(choices)
    if earlier is not None and again and trials.best_us <= ENOUGH * earlier.makespan_us:
        before[options] = earlier._replace(problem=problem)
        return trials, again
    trials = Trials(replicas)
    found = search(trials, warm)
    found += [one for one in again if one not in found]
    least_us = min((one.makespan_us for one in found), default=math.inf)
    before[options] = Earlier(list(dict.fromkeys((*trials.choices(), *choices))), least_us, problem)
    return trials, found


def _candidates(found: Sequence[Candidate], trials: Trials) -> Candidates:
    """Let local search start from the fastest whole backwards, too, and from the fastest order with backwards first."""
    near = [*found, *(one for one in trials.near if one not in found)]
    more = [] if trials.whole is None else [trials.whole]
    backward_first = [trials.best_of[rule] for rule in ROOMY_LISTED if rule in trials.best_of]
    if backward_first and not trials.problem.has_one_stage_per_rank:
        more.append(min(backward_first, key=attrgetter("makespan_us")))
    best = [one.only for one in found]
    best += [one.only for one in more if one.only not in best]
    return Candidates(best, near, [*trials.best_of.values()])


def fastest(choices: Sequence[Decisions], problem: Problem, costs: Costs) -> Decisions:
    """Return the choice of least makespan, the first among equals.

    Args:
        choices: decisions for one batch; at least one.
        problem, costs: as `plan` takes them.
    """
    if len(choices) == 1:
        return choices[0]
    return min(choices, key=lambda one: one.makespan_us(problem, costs))


def finished(found: Candidates, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Improve candidates by local search, and complete their orders: with the vocabulary's shards, and with weight gradients
    split off where that is asked for, the costs time them separately and it is faster.

    Local search with whole backwards comes first, and what it made faster is completed here. Where weight gradients are split
    off it starts from the fastest complete orders instead, and judges each step with its weight gradients split off. Both run
    with shards, which every step is judged with, and with `options.steps`.

    Args:
        found: what the search found.
        problem, costs, options: as `plan` takes them.
    """
    replicas = Replicas((problem,), costs, options)
    split, better = replicas.splits_weight, found.best
    if not split or options.steps or replicas.has_shards:
        better = [improve(one, one.tables(problem, costs), problem, options) for one in better]
    if not split and not replicas.has_shards:
        return fastest(better, problem, costs)
    done = [Completed(one.makespan_us, one.only, replace(one.only, order=one.complete)) for one in found.near if one.complete]
    known = [one.whole for one in done]
    for whole in [*(one for one in better if one not in known), *(known if split else ())]:
        done += _completed(whole, problem, costs, options, done)
    for whole in _fastest(done) if split else ():
        if not searches(options, problem.num_stages * len(whole.chunks)):
            continue
        moved = improve(whole, whole.tables(problem, costs), problem, options, split_weight=True)
        done += _completed(moved, problem, costs, options, done)
    return min(done, key=attrgetter("makespan_us")).made


def _complete(found: Candidates, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Finish candidates, and improve the result, or a candidate that is nearly as fast, by what the settings ask for."""
    made, improve_further = finished(found, problem, costs, options), finisher_of(options)
    if improve_further is None:
        return made
    more = [*found.near, *(one for one in found.of_rules if one not in found.near)]
    more = sorted(more, key=attrgetter("makespan_us"))[:FINISHED]
    orders = [replace(one.only, order=one.complete or one.order) for one in more]
    return improve_further([made, *found.best, *orders], problem, costs, options)


class Completed(NamedTuple):
    """Decisions with the vocabulary's shards, and with weight gradients split off where that is faster.

    Attributes:
        makespan_us: of the complete order.
        whole: the decisions with whole backwards.
        made: the same with the complete order.
    """

    makespan_us: float
    whole: Decisions
    made: Decisions


def _completed(
    whole: Decisions, problem: Problem, costs: Costs, options: Options, before: Sequence[Completed]
) -> list[Completed]:
    """Complete decisions, unless the bound says that they would hardly be faster than the fastest before."""
    tables = whole.tables(problem, costs)
    enough_us = lower_bound_us(tables, whole.chunks, problem, options) * (1 + CLOSE)
    if any(one.makespan_us <= enough_us for one in before):
        return []
    split = Replicas((problem,), costs, options).splits_weight
    parts = SPLIT_PARTS // 2 if whole.copies else SPLIT_PARTS  # each takes several rounds with copies
    order, took_us = completed(whole.order, tables, whole.as_offload, problem.cap_bytes, split, enough_us, parts)
    return [Completed(took_us, whole, replace(whole, order=order))]


def _fastest(done: Sequence[Completed]) -> list[Decisions]:
    """Return the decisions with whole backwards of the fastest, `STARTS` of them."""
    found: list[Decisions] = []
    for one in sorted(done, key=attrgetter("makespan_us")):
        if one.whole not in found:
            found.append(one.whole)
    return found[:STARTS]


def for_table(chunks: tuple[Chunk, ...], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The best order, recompute and offload of activations found for a given chunk table.

    Args:
        chunks: the table in forward order: slices of a sequence stand together, ascending.
        problem, costs, options: as `plan` takes them; what `options` says of slicing and packing is ignored.

    Raises:
        InfeasibleError: nothing that was tried fits the caps.
        PlanError: the arguments make no sense, or the chunks are no such table.
    """
    validate(problem, costs, options)
    refuse_table(Decisions(chunks, (), []), problem, costs, options.planner)
    trials = Trials(Replicas((problem,), costs, options))
    found = search_table(trials, Aligned((chunks,))) or [trials.result()]
    return _complete(_candidates(found, trials), problem, costs, options)


def baseline(schedule: Schedule) -> Planner:
    """A planner for whole sequences, one per chunk in batch order.

    It ignores `slices`, and refuses `chunk_tokens` below the longest.
    """

    def planner(problem: Problem, costs: Costs, options: Options) -> Decisions:
        require_one_stage_per_rank(problem, options)
        require_whole(options, round_up(max(problem.lengths), problem.token_multiple))
        trials = Trials(Replicas((problem,), costs, options))
        trials.better(Aligned((arranged(whole_sequences(problem.lengths), problem.loss_groups),)), (OneStagePerRank(schedule),))
        return trials.result(options.planner).only

    return planner
