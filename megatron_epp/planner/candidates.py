"""Candidates: chunks of a recipe, their order, what recomputes or is copied to the host, and the makespan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from megatron_epp.features import plan_targets
from megatron_epp.plan import UNLIMITED_BYTES, Chunk
from megatron_epp.planner import settings
from megatron_epp.planner.chunk_tables import ChunkTables
from megatron_epp.planner.chunks.in_runs import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.kernels.codes import CodedOrder, Codes, coded
from megatron_epp.planner.memory.offload import Offload
from megatron_epp.planner.message_room import room_for
from megatron_epp.planner.orders.completion import completed
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.settings import Recipe
from megatron_epp.planner.tables import Tables

NEAR_BOUND_SHARE = 0.002
"""Relative excess over a chunk table's bound up to which other orders of the table are not tried. With 0 two plans of 24
differ, up to 0.4 % faster; with 0.01 seven, 1.1 % faster to 0.5 % slower.
"""
MOST_AGAIN = 16
"""Candidates, the best, that are made again where all tables have more room for messages."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Decisions that follow from a recipe, with the chunks of all replicas. Where none fit, a rank lacks `missing_bytes`."""

    recipe: Recipe
    table: Aligned
    missing_bytes: int
    makespan_us: float  # of the slowest replica; infinite where it does not fit
    bound_us: float  # that no order of the chunks beats
    decisions: tuple[Decisions, ...] = ()
    whole_backwards: tuple[Decisions, ...] = ()  # the decisions with whole backwards, and without the vocabulary's shards

    @property
    def key(self) -> tuple[int, float]:
        """Order of candidates, the best first: less memory missing, then a shorter makespan."""
        return self.missing_bytes, self.makespan_us

    @property
    def fits(self) -> bool:
        return not self.missing_bytes

    @property
    def has_copies(self) -> bool:
        return any(own.copies or own.kv_offload for own in self.whole_backwards)


class Candidates:
    """Makes candidates from recipes, and remembers them.

    Args:
        free: candidates for the same batch without caps, whose chunks and orders are used again.
        chunks: the only table, of one replica; None to cut the batch.

    Attributes:
        came_from: of recipes that walks came by, the one before, and a word for the step if it is none of a walk (`why`).
        fastest_us: makespan of the fastest candidate that fits.
        least_cap_bytes, least_host_bytes: smallest cap, and host memory, for which one would fit; 0 where memory was no
            obstacle.
        room: bytes of every rank set aside for messages where plans needed more than was expected, by the identity of their
            table and their reach.
        room_of_reach: the same for all other tables, by the reach, where plans of several needed more.
    """

    def __init__(self, replicas: Replicas, free: Candidates | None = None, chunks: tuple[Chunk, ...] | None = None) -> None:
        self.replicas, self.problem, self.options = replicas, replicas.problems[0], replicas.options
        self.splits = replicas.splits_weight and not replicas.is_lockstep
        self.is_single = self.problem.has_one_stage_per_rank
        self.chunk_tables: ChunkTables = ChunkTables(replicas, chunks) if free is None else free.chunk_tables
        self.orders: settings.Orders = settings.orders_of(self.problem, self.options) if free is None else free.orders
        self.values = settings.values_of(self.problem, self.options, self.orders, self.chunk_tables.cuts, self.splits)
        self.by_recipe: dict[Recipe, Candidate] = {}
        self.came_from: dict[Recipe, tuple[Recipe | None, str]] = {}
        self.free = free
        self.fastest_us = math.inf
        self.least_cap_bytes = self.least_host_bytes = 0
        self.room: dict[tuple[int, str], tuple[int, ...]] = {}
        self.room_of_reach: dict[str, tuple[int, ...]] = {}
        # Chunk tables are known by their identity: to hash one takes longer than to order it.
        self._by_order: dict[tuple[Any, ...], Candidate] = {}
        self._bounds: dict[tuple[int, str], float] = {}
        self._tables: dict[tuple[int, str], tuple[Tables, ...]] = {} if free is None else free._tables
        self._orders: dict[tuple[Any, ...], CodedOrder] = {} if free is None else free._orders

    def fitting(self) -> list[Candidate]:
        return sorted((candidate for candidate in self.by_recipe.values() if candidate.fits), key=attrgetter("makespan_us"))

    def best(self) -> Candidate:
        """Return the best candidate; of recipes that give the same, one that was walked to."""
        return min(self.by_recipe.values(), key=lambda candidate: (candidate.key, candidate.recipe not in self.came_from))

    def of(self, recipe: Recipe, limit_us: float = math.inf) -> Candidate | None:
        """Make the candidate of a recipe; None where the recipe makes no chunks, or their bound is no less than a limit."""
        if recipe in self.by_recipe:
            return self.by_recipe[recipe]
        table = self.chunk_tables.table(recipe)
        if table is None:
            return None
        tables, bound_us = self.tables_and_bound(table, recipe)
        if bound_us >= limit_us:
            return None
        order = self._order(table, tables, recipe)
        key = self._room(table, recipe)[0], recipe.copies, order.key
        if key not in self._by_order:  # many leads give a table the same order
            ordered = tuple(Decisions(chunks, order, [], self.replicas.modes) for chunks in table.chunks)
            unfitted = Candidate(recipe, table, UNLIMITED_BYTES, math.inf, bound_us)
            if recipe.copies == "none":
                candidates = self.recomputed(unfitted, ordered, tables)
            else:
                (copied,) = plan_targets(self.problem, self.options, "candidates")
                candidates = copied(self, unfitted, ordered, tables, limit_us)
            self._by_order[key] = min(candidates, key=attrgetter("key"))
        candidate = self.by_recipe[recipe] = replace(self._by_order[key], recipe=recipe)
        self.fastest_us = min(self.fastest_us, candidate.makespan_us)
        return candidate

    def opening(self, recipe: Recipe, before: Candidate, limit_us: float = math.inf) -> Candidate | None:
        """Make the candidate of a recipe from which to walk besides the best before, as `of` does."""
        self.step(before.recipe, recipe, "opening: ")
        return self.of(recipe, limit_us)

    def step(self, before: Recipe, after: Recipe, word: str = "") -> None:
        """Remember how the search came to a recipe, if it has not been there."""
        self.came_from.setdefault(before, (None, ""))
        self.came_from.setdefault(after, (before, word))

    def tables_and_bound(self, table: Aligned, recipe: Recipe) -> tuple[tuple[Tables, ...], float]:
        """Return times and sizes of the chunks in every replica, and the makespan that none of their orders beats."""
        known, room = self._room(table, recipe)
        if known not in self._tables:
            self._tables[known] = self.replicas.with_room(room).tables(table)
        if known not in self._bounds:
            self._bounds[known] = self.replicas.bound_us(self._tables[known], table)
        return self._tables[known], self._bounds[known]

    def _order(self, table: Aligned, tables: Sequence[Tables], recipe: Recipe) -> CodedOrder:
        reach = self.orders.reaches[recipe.reach]
        key = id(table), recipe.lead if reach.has_lead else 0.0, recipe.reach
        if reach.is_wide or key not in self._orders:
            rule = reach.rule(recipe.lead, int(self.replicas.has_shards))
            order = rule.order(table.stand_in(self.problem.loss_groups), tables[0], self.problem)
            self._orders[key] = coded(order, len(table))
        return self._orders[key]

    def recomputed(self, unfitted: Candidate, ordered: tuple[Decisions, ...], tables: Sequence[Tables]) -> Iterator[Candidate]:
        """Fit recompute to the caps, in two ways if chunks of several stages per rank stay for times of different lengths."""
        fit = self.replicas.fit(codes_of(ordered), tables)
        if fit.recompute_steps is None:
            self.least_cap_bytes = min(self.least_cap_bytes or fit.needed_bytes, fit.needed_bytes)
            yield replace(unfitted, missing_bytes=fit.needed_bytes - min(self.problem.cap_bytes))
            return
        yield self._timed(unfitted, ordered, tables, fit.recompute_steps)
        if any(map(any, fit.recompute_steps)) and self.options.recompute == "auto" and not self.is_single:
            # By price alone, 1 % dearer recompute on the first stages made it fall on chunks that leave soon: up to twice more.
            other = self.replicas.fit(codes_of(ordered), tables, by_stay=True).recompute_steps
            if other is not None and other != fit.recompute_steps:
                yield self._timed(unfitted, ordered, tables, other)

    def _timed(
        self, unfitted: Candidate, ordered: tuple[Decisions, ...], tables: Sequence[Tables], recompute_steps: RecomputeSteps
    ) -> Candidate:
        took_us = makespan_us(codes_of(ordered), tables[0], recompute_steps)
        return self.complete(unfitted, ordered, tables, took_us, [Offload(recompute_steps, (), ())] * len(ordered), self.splits)

    def complete(
        self,
        unfitted: Candidate,
        ordered: tuple[Decisions, ...],
        tables: Sequence[Tables],
        took_us: float,
        offloads: Sequence[Offload],
        splits: bool,
    ) -> Candidate:
        """Add recompute and copies, and to the order the vocabulary's shards and, where `splits`, weight gradients apart."""
        whole = tuple(
            replace(decisions, recompute_steps=own.recompute_steps, copies=own.copies, offload=own.shares)
            for decisions, own in zip(ordered, offloads, strict=True)
        )
        fitted = replace(unfitted, missing_bytes=0, makespan_us=took_us, decisions=whole, whole_backwards=whole)
        if not (splits or self.replicas.has_shards):
            return fitted
        enough_us = unfitted.bound_us * (1 + NEAR_BOUND_SHARE)
        split = next(plan_targets(self.problem, self.options, "split")) if splits else None
        order, took_us = completed(whole[0].order, tables[0], offloads[0], self.problem.cap_bytes, split, enough_us)
        # Replicas in lockstep split their weight gradients together, once a plan is written.
        decisions = whole if self.replicas.is_lockstep else (replace(whole[0], order=order),)
        return replace(fitted, makespan_us=took_us, decisions=decisions)

    def note_host_bytes(self, short_bytes: int) -> None:
        if short_bytes > 0:
            needed = self.problem.host_cap_bytes + short_bytes
            self.least_host_bytes = min(self.least_host_bytes or needed, needed)

    def room_of(self, candidate: Candidate) -> tuple[int, ...]:
        """Return the bytes of every rank set aside for a plan's messages; none for as many as the problem says."""
        return self._room(candidate.table, candidate.recipe)[1]

    def _room(self, table: Aligned, recipe: Recipe) -> tuple[tuple[int, str], tuple[int, ...]]:
        """Return how tables with a recipe's room for messages are known, and the room."""
        known = id(table), recipe.reach
        room = self.room.get(known) or self.room_of_reach.get(recipe.reach, ())
        return known if room else (id(table), ""), room

    def set_room(self, candidate: Candidate, needed: Sequence[int], *, of_all: bool) -> Candidate:
        """Make candidates again with the memory for messages that a plan needed; return the best.

        They are those of the plan's chunk table and reach, or `of_all` chunk tables and the reach.
        """
        table, reach = candidate.table, candidate.recipe.reach
        room = room_for(self.room_of(candidate) or (0,) * len(needed), needed)
        if of_all:
            self.room = {known: own for known, own in self.room.items() if known[1] != reach}
            self.room_of_reach[reach] = room
        else:
            self.room[id(table), reach] = room
        outdated = [own for own in self.by_recipe.values() if own.recipe.reach == reach and (of_all or own.table is table)]
        for known in outdated:
            del self.by_recipe[known.recipe]
        self._tables = {known: tables for known, tables in self._tables.items() if known[1] != reach}
        self._bounds = {known: bound for known, bound in self._bounds.items() if known[1] != reach}
        self._by_order = {known: own for known, own in self._by_order.items() if known[0][1] != reach}
        self.fastest_us = min((known.makespan_us for known in self.by_recipe.values()), default=math.inf)
        outdated.sort(key=attrgetter("key"))
        for known in outdated[:MOST_AGAIN] if of_all else outdated:
            self.of(known.recipe)
        best = self.best()
        self.step(candidate.recipe, best.recipe, "more room for messages: ")
        return best


def codes_of(decisions: Sequence[Decisions]) -> Codes:
    return coded(decisions[0].order, len(decisions[0].chunks)).codes
