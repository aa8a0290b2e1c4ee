"""Plans for replicas that share experts: made together, so that all run the same actions in the same order.

Each layer with experts is an exchange between the replicas, so an action takes as long as the slowest of them takes for it. One
order is made for all, by these times; every replica then has its own chunks in it, its own memory, its own copies to the host,
of which none keeps an action waiting, and its own KV offload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from megatron_epp.cost import Costs
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, Plan, PlanError, Remedy
from megatron_epp.plan.check.lockstep import check_matched
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.align import Aligned, align
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us, play
from megatron_epp.planner.memory.kv_offload import SHARING, Pairs, with_hosted
from megatron_epp.planner.memory.kv_offload_choice import at_host, choices
from megatron_epp.planner.memory.lockstep_recompute import fit_alike
from megatron_epp.planner.memory.messages import planned_with_room
from megatron_epp.planner.memory.offload import Offload, fit_offload
from megatron_epp.planner.orders.list_scheduling import Listing
from megatron_epp.planner.orders.split_weight import fits_beside, weights_apart
from megatron_epp.planner.orders.warm_up import Order, Schedule
from megatron_epp.planner.problem import WHOLE, Options, Problem, validate
from megatron_epp.planner.search.greedy import (
    FAR,
    FIRST,
    HALF,
    HOSTED_PER_STAGE,
    LEAST,
    LISTED,
    PATIENCE,
    SECOND,
    first_grain,
    grain_counts,
    splits,
)
from megatron_epp.planner.search.trials import WORTH, infeasible
from megatron_epp.planner.tables import Tables, tabulate

ALIKE = ("selective", "full")
"""Levels of recompute in the order of all replicas' frontiers, so that equal recompute steps are equal recompute."""
_TIMES = ("forward_us", "backward_us", "weight_us", "hops")


def plan_matched(problems: Sequence[Problem], costs: Costs, options: Options) -> tuple[Plan, ...]:
    """Plan one iteration of replicas that share experts. Equal arguments give equal plans, in every process.

    Args:
        problems: one for each replica, equal but for their lengths.
        costs: of every replica's pipeline.
        options: the settings of the user. The planner must be "greedy", without a budget.

    Returns:
        A plan for each, sound by itself, that `check_matched` finds nothing wrong with. The time of an action is that of the
        slowest replica.

    Raises:
        InfeasibleError: nothing fits the caps, or one replica has too few tokens for the chunks that another needs.
        PlanError: the arguments make no sense, the problems differ in more than their lengths, or (a bug) the plans do not pass
            the checks.
    """
    for problem in problems:
        validate(problem, costs, options)
    _require_equal(problems)
    if options.planner != "greedy" or options.budget_ms:
        remedy = Remedy("drop", "budget_ms") if options.planner == "greedy" else Remedy("set", "planner", "greedy")
        raise PlanError("replicas that share experts are planned by the planner greedy, without a time budget", remedy)

    def planned(asked: Problem) -> tuple[Plan, ...]:
        room = [replace(problem, cap_bytes=asked.cap_bytes, message_bytes=asked.message_bytes) for problem in problems]
        return _Joint(tuple(room), costs, options, _shapes(room, costs, options)).plans()

    plans = planned_with_room(problems[0], planned)
    if faults := check_matched(plans):
        raise PlanError("plans of replicas that share experts do not match: " + "; ".join(map(str, faults[:3])))
    return plans


def _require_equal(problems: Sequence[Problem]) -> None:
    """Raise `PlanError` if there is no problem, or one differs from the first in more than its lengths."""
    if not problems:
        raise PlanError("replicas that share experts need a problem each; there are none")
    for replica, problem in enumerate(problems):
        for name in (field.name for field in fields(Problem) if field.name != "lengths"):
            first, own = getattr(problems[0], name), getattr(problem, name)
            if own != first:
                raise PlanError(
                    f"replicas that share experts run in step and differ in nothing but their lengths: {name} of replica "
                    f"{replica} is {own}, that of replica 0 is {first}; give all the same"
                )


_Grain = dict[str, Any]
"""Keyword arguments of `Chunker.grain`."""


@dataclass(frozen=True, slots=True)
class _Best:
    aligned: Aligned
    tables: tuple[Tables, ...]
    order: Order
    made: tuple[Offload, ...]
    makespan_us: float
    hosted: tuple[Pairs, ...]


def _shapes(problems: Sequence[Problem], costs: Costs, options: Options) -> list[tuple[Chunker, ...]]:
    """List the chunkers of all replicas, and where the token cap binds in one and leaves a choice, the alternative ones."""
    found = [Chunker.of(problem, costs, options.chunk_tokens).shapes for problem in problems]
    return list(dict.fromkeys(tuple(shapes[at] for shapes in found) for at in (0, -1)))


class _Joint:
    """Search for a grain and an order over all replicas at once."""

    def __init__(
        self, problems: tuple[Problem, ...], costs: Costs, options: Options, shapes: Sequence[tuple[Chunker, ...]]
    ) -> None:
        self.problems, self.costs, self.options = problems, costs, options
        self.shapes, self.chunkers = shapes, shapes[0]
        known = options.levels(costs)
        self.levels = ALIKE if set(ALIKE) <= set(known) else WHOLE
        self.best: _Best | None = None
        self.least_cap = self.least_host = 0

    def plans(self) -> tuple[Plan, ...]:
        for chunkers in self.shapes:
            self.chunkers = chunkers
            self.search()
            if self.options.offload and self.options.recompute == "auto" and math.isfinite(self.costs.host_us(1)):
                if not self.problems[0].forward_only:
                    self._search_copies()
                elif self.best is None:
                    self._search_hosted()
        return tuple(self._finished())

    def _schedules(self) -> tuple[Sequence[Schedule | Listing], ...]:
        """Schedules to try first, those to try then, and those of last resort when nothing else fits."""
        return (FIRST, (*SECOND, HALF), LEAST) if self.problems[0].is_straight else (LISTED[:1], LISTED[1:], (Listing(0),))

    def search(self) -> None:
        """Try grains and schedules, without copies."""
        first, second, least = self._schedules()
        (walks, coarser), before = self._walks(), self.best
        for walk in walks:
            worse = 0
            for grain in walk:
                worse = 0 if self._try(self._aligned(grain), first) else worse + 1
                if worse == PATIENCE:
                    break
        if self.best is not None and self.best is not before:
            self._try(self.best.aligned, second)
        if any(chunker.is_even for chunker in self.chunkers):
            self._try(self._aligned({"slices": 1}), (*first, *second))
        for grain in () if self.best is not None else (*(grain for walk in walks for grain in walk), *coarser):
            if self._try(self._aligned(grain), (*second, *least)) and grain in coarser:
                break

    def _search_copies(self) -> None:
        """Try offload with the chunks and orders that would be best if memory did not matter, and with the best so far."""
        roomy = [replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks) for problem in self.problems]
        (free := _Joint(tuple(roomy), self.costs, self.options, [self.chunkers])).search()
        so_far = math.inf if self.best is None else self.best.makespan_us
        if free.best is None or free.best.makespan_us >= WORTH * so_far:
            return
        first, *others = self._schedules()
        schedules = first if free.best.makespan_us >= FAR * so_far else list(chain(first, *others))
        for known in [free.best] if self.best is None else [free.best, self.best]:
            orders = [known.order, *(self._order(known.aligned, known.tables, schedule) for schedule in schedules)]
            for order in dict.fromkeys(orders):
                self._try_copies(known.aligned, order, known.tables, self._nothing)
        if self.best is None or free.best.makespan_us < WORTH * self.best.makespan_us:
            self._search_hosted()

    def _search_hosted(self) -> None:
        """Try KV offload with slices of several lengths (see `greedy.search_hosted`)."""
        if not self.options.hosting:
            return
        fixed, ranks = self.options.slices, self.problems[0].num_ranks
        grains: list[_Grain] = (
            [{"chunks": ranks * share} for share in HOSTED_PER_STAGE] if fixed is None else [{"slices": fixed}]
        )
        aligned = [one for grain in grains if (one := self._aligned(grain, even=True)) is not None]
        (roomy, *_), _, (least, *_) = self._schedules()
        for schedule in (roomy, least):
            for one in aligned:
                self._try_hosted(one, schedule)
            if self.best is not None:
                break

    def _try_hosted(self, aligned: Aligned, schedule: Schedule | Listing) -> None:
        """Try the KV offload that each replica needs, then also what avoids recompute: alone, and combined with copies.

        While nothing fits, this is tried without KV offload too where no replica needs any.
        """
        plain = self._tables(aligned)
        order = self._order(aligned, plain, schedule)
        given = [(*each, self.costs, self.levels) for each in zip(aligned.chunks, self.problems, strict=True)]
        found = [choices(order, own, *rest, in_order=True) for own, rest in zip(plain, given, strict=True)]
        for pairs in dict.fromkeys(zip(*found, strict=True)):
            if not any(pairs) and self.best is not None:
                continue

            def hosted(sharing: float, pairs: tuple[Pairs, ...] = pairs) -> tuple[Tables, ...]:
                every = zip(plain, given, pairs, strict=True)
                return in_step([with_hosted(own, *rest, mine, sharing, in_order=True) for own, rest, mine in every])

            self._try_recompute(aligned, order, hosted(1.0), pairs)
            if not self.problems[0].forward_only:
                self._try_copies(aligned, order, hosted(SHARING), pairs)

    def _try_recompute(self, aligned: Aligned, order: Order, tables: tuple[Tables, ...], pairs: tuple[Pairs, ...]) -> None:
        fit = fit_alike(order, tables, [problem.cap_bytes for problem in self.problems], self.options)
        short = -min(map(min, self._rooms(aligned, order, pairs)))
        if fit.layers is None:
            if short <= 0:  # else no cap would do with this host
                self.least_cap = int(min(self.least_cap or math.inf, fit.needed_bytes))
        elif short > 0:
            self._needs_host(short)
        elif self.best is None or makespan_us(order, tables[0], fit.layers) < self.best.makespan_us:
            made = (Offload(fit.layers, (), ()),) * len(tables)
            self.best = _Best(aligned, tables, order, made, makespan_us(order, tables[0], fit.layers), pairs)

    def _try_copies(self, aligned: Aligned, order: Order, tables: tuple[Tables, ...], pairs: tuple[Pairs, ...]) -> None:
        found = fit_offload(order, tables, self.problems[0].cap_bytes, self._rooms(aligned, order, pairs))
        if found is not None and found.short_bytes:
            self._needs_host(found.short_bytes)
        elif found is not None and (self.best is None or found.makespan_us < self.best.makespan_us):
            self.best = _Best(aligned, tables, order, found.made, found.makespan_us, pairs)

    def _rooms(self, aligned: Aligned, order: Order, pairs: tuple[Pairs, ...]) -> list[list[int]]:
        """Bytes left at the host of every replica's ranks besides KV offload, ``[replica][rank]``."""
        if not any(pairs):
            return [[problem.host_cap_bytes] * problem.num_ranks for problem in self.problems]
        every = zip(aligned.chunks, self.problems, pairs, strict=True)
        return [
            [problem.host_cap_bytes - size for size in at_host(order, chunks, problem, self.costs, mine)]
            for chunks, problem, mine in every
        ]

    def _needs_host(self, short_bytes: int) -> None:
        self.least_host = int(min(self.least_host or math.inf, self.problems[0].host_cap_bytes + short_bytes))

    @property
    def _nothing(self) -> tuple[Pairs, ...]:
        """KV offload of no replica."""
        return (frozenset(),) * len(self.problems)

    def _walks(self) -> tuple[list[list[_Grain]], list[_Grain]]:
        """List the grains to walk through: from a middling number of chunks to more, and to fewer, or the one given by slices.

        The second list has coarser ones, for the case that a replica has too few tokens for these.
        """
        slices, ranks = self.options.slices, self.problems[0].num_ranks
        if slices is not None:
            return [[{"slices": slices}]], [{"slices": fewer} for fewer in range(slices - 1, 0, -1)]
        found = grain_counts(ranks, min(chunker.coarsest for chunker in self.chunkers))
        counts: list[_Grain] = [{"chunks": count} for count in found]
        start = first_grain(found, ranks)
        return [counts[start:], counts[:start][::-1]], [{"chunks": fewer} for fewer in range(ranks - 1, 0, -1)] or counts[:1]

    def _aligned(self, grain: _Grain, even: bool = False) -> Aligned | None:
        tables = []
        for chunker in self.chunkers:
            own = chunker.grain(**grain)
            tables.append((chunker.evener(own) if even else chunker).table(own))
        return align(tables, self.chunkers)

    def _try(self, aligned: Aligned | None, schedules: Sequence[Schedule | Listing]) -> bool:
        """Try a table with some schedules; True if one of them is faster than all before."""
        if aligned is None:
            return False
        tables, before = self._tables(aligned), self.best
        for schedule in schedules:
            order = self._order(aligned, tables, schedule)
            self._try_recompute(aligned, order, tables, self._nothing)
        return self.best is not before

    def _tables(self, aligned: Aligned) -> tuple[Tables, ...]:
        every = zip(aligned.chunks, self.problems, strict=True)
        return in_step([tabulate(*each, self.costs, self.levels, in_order=True) for each in every])

    def _order(self, aligned: Aligned, tables: Sequence[Tables], schedule: Schedule | Listing) -> Order:
        if isinstance(schedule, Listing):
            return schedule.order(aligned.skeleton, tables[0])
        return schedule(aligned.skeleton, self.problems[0].num_stages, self.problems[0].forward_only)

    def _finished(self) -> Iterator[Plan]:
        best, options = self.best, self.options
        if best is None and self.least_cap:
            raise infeasible(self.problems[0], self.least_cap, self.least_host)
        if best is None:
            fewest = min(sum(problem.lengths) for problem in self.problems)
            raise InfeasibleError(
                f"replicas that share experts need as many chunks each, and one that has {fewest} tokens in all has too few",
                Remedy("raise", "global_batch_size"),
                Remedy("raise", "chunk_tokens"),
                Remedy("lower", "slices"),
                Remedy("lower", "expert_parallel"),
            )
        order = self._split(best) if splits(self.problems[0], self.costs, options) else best.order
        every = zip(self.problems, best.aligned.chunks, best.tables, best.made, best.hosted, strict=True)
        for problem, chunks, tables, made, hosted in every:
            decided = Decisions(chunks, order, made.layers, copies=made.copies, offload=made.shares, hosted=hosted)
            yield build_plan(problem, self.costs, options, decided, tables)

    def _split(self, best: _Best) -> Order:
        """Split weight gradients off the order, equally for all replicas.

        Exchanges then come at the same times everywhere, so that all replicas issue receives in the same places among them. A
        replica's own split is a candidate where it fits all.
        """
        every = list(zip(best.tables, best.made, (problem.cap_bytes for problem in self.problems), strict=True))
        orders = dict.fromkeys(weights_apart(best.order, *one) for one in every)
        fitting = [order for order in orders if all(fits_beside(order, *one) for one in every)]
        tables, made, _ = every[0]
        return min([best.order, *fitting], key=lambda order: play(order, tables, made.layers).makespan_us)


def in_step(tables: Sequence[Tables]) -> tuple[Tables, ...]:
    """Return every replica's tables with the times of the slowest at each stage and chunk."""
    common = {name: np.max([getattr(own, name) for own in tables], axis=0).tolist() for name in _TIMES}
    message_us = np.max([own.message_us for own in tables], axis=0).tolist()
    again_us = [
        np.max([rung.layer_us for rung in rungs], axis=0).tolist() for rungs in zip(*(own.rungs for own in tables), strict=True)
    ]
    return tuple(
        replace(
            own,
            **common,
            message_us=message_us,
            rungs=tuple(replace(rung, layer_us=time_us) for rung, time_us in zip(own.rungs, again_us, strict=True)),
        )
        for own in tables
    )
