"""Replicas that are planned together. One is the ordinary case; replicas that share experts run in lockstep.

Each layer with experts is an exchange between lockstep replicas, so an action takes as long as the slowest of them needs for
it. By these times one order and one recompute are chosen; chunks, memory, copies to the host and KV offload are each replica's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import neg
from typing import Any

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.features import plan_targets
from megatron_epp.plan import UNLIMITED_BYTES, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.operations import OperationRows
from megatron_epp.plan.problem import OF_SEQUENCES, Options, Problem
from megatron_epp.plan.recompute import FULL_ONLY
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.in_runs import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import RecomputeFit, fit_lockstep, is_within
from megatron_epp.planner.kernels.codes import Codes, coded
from megatron_epp.planner.memory.kv_offload_tables import Pairs, with_kv_offload
from megatron_epp.planner.message_room import raised
from megatron_epp.planner.orders.completion import peaks
from megatron_epp.planner.passes import StagePasses
from megatron_epp.planner.tables import Tables, tabulate, tabulate_each
from megatron_epp.planner.validation import validate

LOCKSTEP_MODES = ("selective", "full")
"""Recompute modes in the order of all replicas' frontiers, so that equal recompute steps are equal recompute."""
_TIMES = ("forward_us", "backward_us", "weight_us", "saved_by_split_us", "exchange_us")


@dataclass(frozen=True, slots=True)
class Replicas:
    """Problems that get one order, equal in all but their lengths, with what is needed to plan them."""

    problems: tuple[Problem, ...]
    costs: Costs
    options: Options

    @property
    def is_lockstep(self) -> bool:
        return len(self.problems) > 1

    @property
    def modes(self) -> tuple[str, ...]:
        known = self.options.modes(self.costs.recompute_modes)
        if not self.is_lockstep:
            return known
        return LOCKSTEP_MODES if set(LOCKSTEP_MODES) <= set(known) else FULL_ONLY

    @property
    def without_caps(self) -> Replicas:
        return self.with_caps(UNLIMITED_BYTES)

    def with_caps(self, cap_bytes: int) -> Replicas:
        return replace(self, problems=tuple(raised(problem, cap_bytes) for problem in self.problems))

    def with_room(self, message_bytes: tuple[int, ...]) -> Replicas:
        """Return the replicas with so many bytes of every rank set aside for messages; none for as many as the problem says."""
        if not message_bytes:
            return self
        return replace(self, problems=tuple(replace(problem, message_bytes=message_bytes) for problem in self.problems))

    @property
    def can_offload(self) -> bool:
        """True if plans may offload activations: asked for, with recompute left to the planner and a link to the host."""
        return self.options.offload and self.options.recompute == "auto" and math.isfinite(self.costs.host_us(1))

    @property
    def splits_weight(self) -> bool:
        """True if weight gradients may be split off: asked for, timed apart by the costs, and not an evaluation."""
        return self.options.split_weight and self.costs.splits_weight and not self.problems[0].forward_only

    @property
    def has_shards(self) -> bool:
        """True if the vocabulary is in shards over the ranks, which orders then need operations for."""
        return self.costs.vocabulary is not None

    def chunkers(self) -> list[Chunker]:
        return [Chunker.of(problem, self.costs, self.options.chunk_tokens) for problem in self.problems]

    def tables(self, table: Aligned) -> tuple[Tables, ...]:
        if not self.is_lockstep:
            return (tabulate(table.chunks[0], self.problems[0], self.costs, self.modes),)
        return slowest_times(tabulate_each(table.chunks, self.problems, self.costs, self.modes))

    def kv_offload(
        self, tables: Sequence[Tables], table: Aligned, pairs: tuple[Pairs, ...], sharing: float = 1.0
    ) -> tuple[Tables, ...]:
        """Tabulate with KV offload, from tables without it."""
        every = zip(zip(tables, table.chunks, self.problems, strict=True), pairs, strict=True)
        shared = self.costs, self.modes
        return slowest_times([with_kv_offload(*own, *shared, mine, sharing, self.is_lockstep) for own, mine in every])

    def fit(self, codes: Codes, tables: Sequence[Tables], by_stay: bool = False) -> RecomputeFit:
        """Fit the recompute of all replicas under their caps. Arguments as in `fit_recompute`."""
        return fit_lockstep(codes, tables, [problem.cap_bytes for problem in self.problems], self.options, by_stay)

    def bound_us(self, tables: Sequence[Tables], table: Aligned) -> float:
        return max(lower_bound_us(*each, self.options) for each in zip(tables, table.chunks, self.problems, strict=True))


def slowest_times(tables: Sequence[Tables]) -> tuple[Tables, ...]:
    """Return every replica's tables with the times of the slowest at each stage and chunk, and room for the largest chunk."""
    if len(tables) == 1:
        return tuple(tables)
    hops = tuple(np.max(rows, axis=0) for rows in zip(*(own.hops for own in tables), strict=True))
    added = {op: _largest([own.added[op] for own in tables]) for op in tables[0].added}
    room = tuple(map(max, *(own.added_room for own in tables)))
    exchanges = tuple(map(max, *(own.exchange_room for own in tables)))
    together = list(zip(*(own.passes for own in tables), strict=True))  # by stage
    slowed = {passes: _slowest(passes) for passes in dict.fromkeys(together)}
    slowest = []
    for number, own in enumerate(tables):
        more = room, exchanges, map(neg, own.added_room), map(neg, own.exchange_room)
        static = tuple(map(sum, zip(own.static, *more, strict=True)))
        passes = tuple(slowed[same][number] for same in together)
        as_slow = replace(own, passes=passes, hops=hops, added=added)
        slowest.append(replace(as_slow, added_room=room, exchange_room=exchanges, static=static))
    return tuple(slowest)


def _slowest(replicas: Sequence[StagePasses]) -> list[StagePasses]:
    times: dict[str, Any] = {name: np.max([getattr(own, name) for own in replicas], axis=0) for name in _TIMES}
    layer_us = np.max([own.frontier.layer_us for own in replicas], axis=0)
    return [replace(own, **times, frontier=own.frontier._replace(layer_us=layer_us)) for own in replicas]


def _largest(rows: Sequence[OperationRows]) -> OperationRows:
    """Return the longest times and largest bytes of an operation in all replicas, so that all insert it at the same places."""
    takes = np.max([own.takes for own in rows], axis=0)
    frees = np.array([np.array(own.gives) - np.array(own.takes) for own in rows])  # below zero for what it leaves
    frees = np.where(frees.max(axis=0) > 0, frees.max(axis=0), frees.min(axis=0))
    carried = {op: np.max([own.collective_us[op] for own in rows], axis=0).tolist() for op in rows[0].collective_us}
    return OperationRows(
        np.max([own.time_us for own in rows], axis=0).tolist(), takes.tolist(), (takes + frees).tolist(), carried
    )


def require_equal(problems: Sequence[Problem], costs: Costs, options: Options) -> None:
    """Raise what `validate` does, and `PlanError` for other planners than "greedy" or problems not equal but for lengths."""
    for problem in problems:
        validate(problem, costs, options)
    if not problems:
        raise PlanError("replicas that share experts need a problem each; there are none")
    for replica, problem in enumerate(problems):
        for name in (field.name for field in fields(Problem) if field.name not in OF_SEQUENCES):
            first, own = getattr(problems[0], name), getattr(problem, name)
            if own != first:
                raise PlanError(
                    f"replicas that share experts run in lockstep and differ in nothing but their lengths: {name} of replica "
                    f"{replica} is {own}, that of replica 0 is {first}; give all the same"
                )
    if len({len(set(problem.microbatches)) for problem in problems}) > 1:
        raise PlanError("replicas that share experts run equally many microbatches; give all as many")
    if options.planner != "greedy":
        raise PlanError("only the planner greedy plans replicas that share experts", Remedy("set", "planner", "greedy"))


def too_few_tokens(replicas: Replicas) -> InfeasibleError:
    """Build the error of replicas in lockstep of which one has too few tokens for the chunks that another needs."""
    fewest = min(sum(problem.lengths) for problem in replicas.problems)
    return InfeasibleError(
        f"replicas that share experts need as many chunks each, and one that has {fewest} tokens in all has too few",
        Remedy("raise", "global_batch_size"),
        Remedy("raise", "chunk_tokens"),
        Remedy("lower", "slices"),
        Remedy("lower", "expert_parallel"),
    )


def split_together(by_replica: Sequence[Decisions], tables: Sequence[Tables], replicas: Replicas) -> tuple[Decisions, ...]:
    """Split weight gradients off the order of replicas in lockstep, equally for all, where that is allowed, faster and fits.

    Exchanges then come at the same times everywhere, so all issue receives at the same positions. Each replica's own split is
    tried.
    """
    whole, recompute_steps = by_replica[0].order, by_replica[0].recompute_steps
    orders = {coded(whole, len(by_replica[0].chunks)).key: whole}
    every = [(own, decisions.as_offload) for own, decisions in zip(tables, by_replica, strict=True)]
    caps = replicas.problems[0].cap_bytes
    splits = plan_targets(replicas.problems[0], replicas.options, "split") if replicas.splits_weight else ()
    for split, own in product(splits, every):
        order = coded(split(whole, *own, caps)[0], len(by_replica[0].chunks))
        if all(is_within(peaks(order, *each), caps) for each in every):
            orders[order.key] = order
    fastest = min(orders.values(), key=lambda order: makespan_us(order, tables[0], recompute_steps))
    return tuple(replace(decisions, order=fastest, modes=FULL_ONLY) for decisions in by_replica)  # the tables have the modes
