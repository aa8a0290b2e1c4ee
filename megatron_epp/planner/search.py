"""The search for a plan: how elastic plans are made.

A plan follows from a *recipe* (`settings.Recipe`): a few settings, each with values in a row. From a recipe a candidate is
made without further choice: sequences are cut and packed into chunks, the actions ordered, recompute (or copies to the host)
fitted to the memory caps, and the order timed. Searching is *walking*: along one setting after another, to both sides, as long
as candidates get better, until no setting makes them better. Of candidates that do not fit, the better one lacks less memory.

First the walk is free of memory caps: its end is the fastest plan if memory did not matter. From there it goes on under the
caps, where candidates recompute what they must, and other values may need less of that. Where memory is short, further walks
begin at *openings*, recipes that keep little and that a walk from the fastest hardly comes by. Copies to the host come last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from megatron_epp.plan import UNLIMITED_BYTES, Chunk
from megatron_epp.planner import settings
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.cuts import Cuts
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.kernels.codes import CodedOrder, Codes, coded
from megatron_epp.planner.local_search import SMALL
from megatron_epp.planner.memory.ahead import fit_ahead, longest_lived_shares
from megatron_epp.planner.memory.kv_offload import SHARINGS, leaves_link
from megatron_epp.planner.memory.offload import Copied, Offload, fit_offload, timed
from megatron_epp.planner.messages import room_for
from megatron_epp.planner.orders.completion import completed
from megatron_epp.planner.replicas import Replicas, too_few_tokens
from megatron_epp.planner.settings import Recipe, RecipeSetting
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.work import spend

GAIN = 1e-4
"""Relative gain that a chunk table's bound must leave for its orders to be tried."""
CLOSE = 0.002
"""Relative excess over a chunk table's bound up to which other orders of the table are not tried."""
PATIENCE = 2
"""Values in a row that may be no faster before a walk turns back."""
NEARLY = 1.05
"""Makespan, as a multiple of the best, up to which a walk goes on from another grain, or with copies."""
FAR, DISTANT = 1.03, 1.02
"""Makespan, as a multiple of the fastest without caps, and of the bound, above which openings are tried. Copies are given other
leads above `DISTANT` times the fastest without caps.
"""
WORTH = 0.992
"""Makespan without caps, as a share of the best, below which copies to the host are tried."""
FEW = 64
"""Most sequences for which chunks of whole sequences are tried free of caps."""
ROUNDS = 4
"""Times that copies are chosen for ever lower caps."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Decisions that follow from a recipe.

    Attributes:
        recipe: the recipe.
        table: its chunks, of all replicas.
        missing_bytes: that a rank lacks; 0 where the candidate fits.
        makespan_us: of the slowest replica; infinite where it does not fit.
        bound_us: that no order of the chunks beats.
        decisions: of every replica; empty where it does not fit.
        whole: the same with whole backwards, and without the vocabulary's shards.
    """

    recipe: Recipe
    table: Aligned
    missing_bytes: int
    makespan_us: float
    bound_us: float
    decisions: tuple[Decisions, ...] = ()
    whole: tuple[Decisions, ...] = ()

    @property
    def key(self) -> tuple[int, float]:
        """Order of candidates, the best first: less memory missing, then a shorter makespan."""
        return self.missing_bytes, self.makespan_us

    @property
    def fits(self) -> bool:
        return not self.missing_bytes


class Candidates:
    """Makes candidates from recipes, and remembers them.

    Args:
        free: candidates for the same batch without caps, whose chunks and orders are used again.
        chunks: the only table, of one replica; None to cut the batch.

    Attributes:
        cuts: makes the chunks of a recipe.
        values: of every setting.
        by_recipe: candidates made so far.
        came_from: of recipes that walks came by, the one before, and a word for the step if it is none of a walk (`why`).
        fastest_us: makespan of the fastest candidate that fits.
        least_cap_bytes: smallest cap that would have let one fit; 0 where memory was never the obstacle.
        least_host_bytes: the same of host memory.
        room: bytes of every rank set aside for messages, by the identity of tables whose plans needed more than was expected.
    """

    def __init__(self, replicas: Replicas, free: Candidates | None = None, chunks: tuple[Chunk, ...] | None = None) -> None:
        self.replicas, self.problem, self.options = replicas, replicas.problems[0], replicas.options
        self.splits = replicas.splits_weight and not replicas.is_lockstep
        self.is_single = self.problem.has_one_stage_per_rank
        self.cuts: Cuts = Cuts(replicas, chunks) if free is None else free.cuts
        self.values = settings.values_of(self.problem, self.options, len(self.cuts.chunkers), self.splits)
        self.by_recipe: dict[Recipe, Candidate] = {}
        self.came_from: dict[Recipe, tuple[Recipe | None, str]] = {}
        self.free = free
        self.fastest_us = math.inf
        self.least_cap_bytes = self.least_host_bytes = 0
        self.room: dict[int, tuple[int, ...]] = {}
        # Chunk tables are known by their identity: to hash one takes longer than to order it.
        self._by_order: dict[tuple[Any, ...], Candidate] = {}
        self._bounds: dict[int, float] = {}
        self._tables: dict[int, tuple[Tables, ...]] = {} if free is None else free._tables
        self._orders: dict[tuple[Any, ...], CodedOrder] = {} if free is None else free._orders

    def fitting(self) -> list[Candidate]:
        """List the candidates that fit, the fastest first."""
        return sorted((candidate for candidate in self.by_recipe.values() if candidate.fits), key=attrgetter("makespan_us"))

    def best(self) -> Candidate:
        """Return the best candidate; of recipes that give the same, one that was walked to."""
        return min(self.by_recipe.values(), key=lambda candidate: (candidate.key, candidate.recipe not in self.came_from))

    # ---- from a recipe to a candidate --------------------------------------------------------------------------------

    def of(self, recipe: Recipe, limit_us: float = math.inf) -> Candidate | None:
        """Make the candidate of a recipe; None where the recipe makes no chunks, or their bound is no less than a limit."""
        if recipe in self.by_recipe:
            return self.by_recipe[recipe]
        table = self.cuts.table(recipe)
        if table is None:
            return None
        tables, bound_us = self.tables(table)
        if bound_us >= limit_us:
            return None
        order = self._order(table, tables, recipe)
        key = id(table), recipe.copies, order.key
        if key not in self._by_order:  # many leads give a table the same order
            plain = tuple(Decisions(chunks, order, [], self.replicas.modes) for chunks in table.chunks)
            nothing = Candidate(recipe, table, UNLIMITED_BYTES, math.inf, bound_us)
            if recipe.copies == "none":
                candidates = self._recomputed(nothing, plain, tables)
            else:
                candidates = self._copied(nothing, plain, tables, limit_us)
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

    def tables(self, table: Aligned) -> tuple[tuple[Tables, ...], float]:
        """Return times and sizes of the chunks in every replica, and the makespan that none of their orders beats."""
        number = id(table)
        if number not in self._tables:
            self._tables[number] = self.replicas.with_room(self.room.get(number, ())).tables(table)
        if number not in self._bounds:
            self._bounds[number] = self.replicas.bound_us(self._tables[number], table)
        return self._tables[number], self._bounds[number]

    def _order(self, table: Aligned, tables: Sequence[Tables], recipe: Recipe) -> CodedOrder:
        reach = settings.REACHES[recipe.reach]
        key = id(table), recipe.lead if reach.has_lead else 0.0, recipe.reach
        if reach.is_wide or key not in self._orders:
            rule = reach.rule(recipe.lead, int(self.replicas.has_shards))
            order = rule.order(table.stand_in(self.problem.loss_groups), tables[0], self.problem)
            self._orders[key] = coded(order, len(table))
        spend(self.problem.num_stages * len(table))
        return self._orders[key]

    def _recomputed(self, nothing: Candidate, plain: tuple[Decisions, ...], tables: Sequence[Tables]) -> Iterator[Candidate]:
        """Fit recompute to the caps.

        Where chunks of several stages per rank stay for times of different lengths, two ways to choose it are tried.
        """
        fit = self.replicas.fit(codes_of(plain), tables)
        if fit.recompute_steps is None:
            self.least_cap_bytes = min(self.least_cap_bytes or fit.needed_bytes, fit.needed_bytes)
            yield replace(nothing, missing_bytes=fit.needed_bytes - min(self.problem.cap_bytes))
            return
        yield self._timed(nothing, plain, tables, fit.recompute_steps)
        if any(map(any, fit.recompute_steps)) and self.options.recompute == "auto" and not self.is_single:
            # By price alone, 1 % dearer recompute on the first stages made it fall on chunks that leave soon: up to twice more.
            other = self.replicas.fit(codes_of(plain), tables, by_stay=True).recompute_steps
            if other is not None and other != fit.recompute_steps:
                yield self._timed(nothing, plain, tables, other)

    def _timed(
        self, nothing: Candidate, plain: tuple[Decisions, ...], tables: Sequence[Tables], recompute_steps: RecomputeSteps
    ) -> Candidate:
        took_us = makespan_us(codes_of(plain), tables[0], recompute_steps)
        return self.complete(nothing, plain, tables, took_us, [Offload(recompute_steps, (), ())] * len(plain), self.splits)

    def complete(
        self,
        nothing: Candidate,
        plain: tuple[Decisions, ...],
        tables: Sequence[Tables],
        took_us: float,
        offloads: Sequence[Offload],
        splits: bool,
    ) -> Candidate:
        """Add recompute and copies, and to the order the vocabulary's shards and, where `splits`, weight gradients apart."""
        whole = tuple(
            replace(decisions, recompute_steps=own.recompute_steps, copies=own.copies, offload=own.shares)
            for decisions, own in zip(plain, offloads, strict=True)
        )
        fitted = replace(nothing, missing_bytes=0, makespan_us=took_us, decisions=whole, whole=whole)
        if not (splits or self.replicas.has_shards):
            return fitted
        enough_us = nothing.bound_us * (1 + CLOSE)
        order, took_us = completed(whole[0].order, tables[0], offloads[0], self.problem.cap_bytes, splits, enough_us)
        # Replicas in lockstep split their weight gradients together, once a plan is written.
        decisions = whole if self.replicas.is_lockstep else (replace(whole[0], order=order),)
        return replace(fitted, makespan_us=took_us, decisions=decisions)

    def _copied(
        self, nothing: Candidate, plain: tuple[Decisions, ...], tables: Sequence[Tables], limit_us: float
    ) -> Iterator[Candidate]:
        """Copy to the host what the recipe says."""
        yield nothing
        copies, order, table = nothing.recipe.copies, plain[0].order, nothing.table
        if copies == "activations":
            room = [[problem.host_cap_bytes] * problem.num_ranks for problem in self.replicas.problems]
            yield from self._with_activations(nothing, plain, tables, limit_us, room)
            return
        for pairs in self.replicas.choices(order, tables, table):
            if copies == "both" and not any(pairs):
                continue  # with keys alone, chunks cut for the copies may fit as they are where those of other recipes do not
            away = tuple(replace(decisions, kv_offload=own) for decisions, own in zip(plain, pairs, strict=True))
            room = self.replicas.host_room(order, table, pairs)
            if copies == "both":
                yield self._with_both(nothing, away, tables, limit_us, room)
                continue
            own_tables = self.replicas.kv_offload(tables, table, pairs)
            if (short := -min(map(min, room))) <= 0:
                yield from self._recomputed(nothing, away, own_tables)
            elif self.replicas.fit(codes_of(plain), own_tables).recompute_steps is not None:
                self._note_host(short)  # it would fit with more at the host

    def _with_both(
        self,
        nothing: Candidate,
        away: tuple[Decisions, ...],
        tables: Sequence[Tables],
        limit_us: float,
        room: list[list[int]],
    ) -> Candidate:
        """Copy activations besides keys and values, with the link no slower for these than the copies make it."""
        pairs = tuple(decisions.kv_offload for decisions in away)
        for sharing in SHARINGS:
            own = tuple(replace(decisions, kv_sharing=sharing) for decisions in away)
            own_tables = self.replicas.kv_offload(tables, nothing.table, pairs, sharing)
            best = min(self._with_activations(nothing, own, own_tables, limit_us, room), key=attrgetter("key"), default=nothing)
            every = zip(best.decisions, own_tables, strict=best.fits)
            if all(leaves_link(timed(decisions.as_offload, of), of, best.makespan_us, sharing) for decisions, of in every):
                break
        return best

    def _with_activations(
        self,
        nothing: Candidate,
        plain: tuple[Decisions, ...],
        tables: Sequence[Tables],
        limit_us: float,
        room: list[list[int]],
    ) -> Iterator[Candidate]:
        """Copy activations where a cap requires it, and without KV offload ahead of that, as the link has time.

        The vocabulary's shards move actions after copies were chosen, so bytes are away at other times. Where that takes a rank
        above its cap, copies are chosen again for a lower one.
        """
        order, aims = plain[0].order, self.problem.cap_bytes
        for _ in range(ROUNDS):
            candidate, above = self._with_copies(nothing, plain, tables, fit_offload(order, tables, aims, room))
            if not any(above):
                yield candidate
                break
            aims = tuple(aim - excess for aim, excess in zip(aims, above, strict=True))
        if not (self.replicas.is_lockstep or plain[0].kv_offload):
            shares = longest_lived_shares(tables[0])
            ahead = fit_ahead(order, tables[0], self.problem.cap_bytes, room[0], shares, limit_us)
            candidate, above = self._with_copies(nothing, plain, tables, ahead)
            if not any(above):
                yield candidate

    def _with_copies(
        self, nothing: Candidate, plain: tuple[Decisions, ...], tables: Sequence[Tables], copied: Copied | None
    ) -> tuple[Candidate, list[int]]:
        """Complete a candidate with copies, where there are any and the host has room for them.

        Returns:
            the candidate and the bytes by which each rank is above its cap. Weight gradients stay in their backwards where they
            would take a rank above its cap by themselves.
        """
        candidate, above = nothing, [0] * self.problem.num_ranks
        if copied is not None and copied.short_bytes:
            self._note_host(copied.short_bytes)
        elif copied is not None:
            for splits in (True, False) if self.splits else (False,):
                candidate = self.complete(nothing, plain, tables, copied.makespan_us, copied.offloads, splits)
                above = self.replicas.above_caps(candidate.decisions, tables)
                if not any(above):
                    break
        return candidate, above

    def _note_host(self, short_bytes: int) -> None:
        if short_bytes > 0:
            needed = self.problem.host_cap_bytes + short_bytes
            self.least_host_bytes = min(self.least_host_bytes or needed, needed)

    def set_room(self, candidate: Candidate, needed: Sequence[int]) -> Candidate:
        """Make the candidates of a table again with the memory for messages in flight that a plan of it needed.

        Args:
            candidate: of the table, which the plan was written from.
            needed: bytes of every rank.

        Returns:
            the best of all.
        """
        table, number = candidate.table, id(candidate.table)
        before = self.room.get(number) or (0,) * len(needed)
        self.room[number] = room_for(before, needed)
        self._tables = {other: tables for other, tables in self._tables.items() if other != number}
        self._bounds.pop(number, None)
        self._by_order = {key: known for key, known in self._by_order.items() if key[0] != number}
        again = [recipe for recipe, known in self.by_recipe.items() if known.table is table]
        self.by_recipe = {recipe: known for recipe, known in self.by_recipe.items() if known.table is not table}
        self.fastest_us = min((known.makespan_us for known in self.by_recipe.values()), default=math.inf)
        for recipe in again:
            self.of(recipe)
        best = self.best()
        self.step(candidate.recipe, best.recipe, "more room for messages: ")
        return best


def codes_of(decisions: Sequence[Decisions]) -> Codes:
    """Return the order of all replicas as numbers."""
    return coded(decisions[0].order, len(decisions[0].chunks)).codes


# ---- walking ---------------------------------------------------------------------------------------------------------


def walk(candidates: Candidates, best: Candidate, setting: RecipeSetting) -> Candidate:
    """Walk along one setting to both sides, as long as it gets better; return the best.

    Args:
        best: where to begin.
    """
    if setting.keeps_chunks and best.fits and best.makespan_us <= best.bound_us * (1 + CLOSE):
        return best
    if setting is settings.LEAD and not settings.REACHES[best.recipe.reach].has_lead:
        return best
    values, start = candidates.values[setting.name], best
    at = values.index(getattr(start.recipe, setting.name)) if getattr(start.recipe, setting.name) in values else 0
    for side in (values[at + 1 :], values[:at][::-1]) if setting.is_ordered else (values,):
        worse, seen = 0, [start.table]
        for value in side:
            recipe = start.recipe._replace(**{setting.name: value})
            table = candidates.cuts.table(recipe)
            if table is None or (not setting.keeps_chunks and any(table is other for other in seen)):
                continue  # short sequences leave many grains with one table: neither better nor worse
            seen.append(table)
            candidate = candidates.of(recipe, candidates.fastest_us * (1 - GAIN))
            is_better = candidate is not None and candidate.key < best.key
            best = candidate if candidate is not None and is_better else best
            worse = 0 if is_better else worse + 1
            if setting.is_ordered and worse == PATIENCE:
                break
    candidates.step(start.recipe, best.recipe)
    return best


def descend(candidates: Candidates, best: Candidate, along: Sequence[RecipeSetting] = settings.SETTINGS) -> Candidate:
    """Walk along all settings in turn until none makes it better.

    Args:
        candidates, best: as `walk` takes them.
    """
    unchanged = at = 0
    while unchanged < len(along):
        after = walk(candidates, best, along[at % len(along)])
        unchanged = unchanged + 1 if after is best else 1
        best, at = after, at + 1
    return best


def at_next_grains(candidates: Candidates, best: Candidate) -> Candidate:
    """Descend from the next finer and the next coarser grain too, where they are nearly as fast: orders depend on them."""
    before = None
    while best is not before and best.fits:
        before = best
        for recipe in next_grains(candidates, before.recipe):
            there = candidates.opening(recipe, before, best.makespan_us * (1 - GAIN))
            if there is not None and there.makespan_us <= NEARLY * best.makespan_us:
                for setting in settings.SETTINGS:
                    there = walk(candidates, there, setting) if setting.keeps_chunks else there
                best = min(best, there, key=attrgetter("key"))
        best = descend(candidates, best) if best is not before else best
    return best


def next_grains(candidates: Candidates, recipe: Recipe) -> Iterator[Recipe]:
    """Yield the recipe with the next finer and the next coarser grain that makes other chunks."""
    values, same = candidates.values["grain"], candidates.cuts.table(recipe)
    finer, coarser = [grain for grain in values if grain > recipe.grain], [grain for grain in values if grain < recipe.grain]
    for side in (finer, coarser[::-1]):
        others = (recipe._replace(grain=grain) for grain in side)
        yield from islice((other for other in others if candidates.cuts.table(other) not in (None, same)), 1)


# ---- the search ------------------------------------------------------------------------------------------------------


def search(replicas: Replicas) -> Candidates:
    """Search, free of caps and then under them; return all candidates under the caps.

    Raises:
        InfeasibleError: a replica has too few tokens for the chunks that another needs.
    """
    free = Candidates(replicas.without_caps)
    fastest = free_of_caps(free)
    candidates = Candidates(replicas, free)
    best = under_caps(candidates, fastest)
    best = from_openings(candidates, best, fastest)
    with_copies(candidates, best, fastest)
    return candidates


def first_candidate(candidates: Candidates, recipe: Recipe) -> Candidate:
    """Return the candidate of a recipe, or of the first coarser grain that all replicas have tokens for.

    Raises:
        InfeasibleError: there is none.
    """
    coarser = [grain for grain in candidates.values["grain"][::-1] if grain < recipe.grain]
    ranks = candidates.problem.num_ranks
    for grain in (recipe.grain, *coarser, *(chunks / ranks for chunks in range(ranks - 1, 0, -1))):
        if (candidate := candidates.of(recipe._replace(grain=grain))) is not None:
            return candidate
    raise too_few_tokens(candidates.replicas)


def free_of_caps(free: Candidates) -> Candidate:
    """Descend without caps, from every way to cut where a token cap binds, and from whole sequences where there are few."""
    first = settings.first_recipe(free.problem)
    best, others = descend(free, first_candidate(free, first)), list[Recipe]()
    if len(free.values["cut"]) > 1 and free.cuts.in_turns != 1:
        others.append(best.recipe._replace(cut=1))
    if free.is_single and len(free.problem.lengths) <= FEW:
        others += (recipe for recipe, _ in openings(free, first, settings.WHOLE_OPENINGS))
    for recipe in others:
        there = free.opening(recipe, best, best.makespan_us * (1 - GAIN))
        if there is not None:
            there = descend(free, there) if recipe.grain != settings.WHOLE else there
            best = min(best, there, key=attrgetter("key"))
    return best if free.is_single else at_next_grains(free, best)


def under_caps(candidates: Candidates, fastest: Candidate) -> Candidate:
    """Go on from the fastest plan without caps."""
    best = candidates.of(fastest.recipe)
    assert best is not None
    if best.fits and best.makespan_us <= fastest.makespan_us * (1 + GAIN):  # it fits as it is
        return best
    best = descend(candidates, best)
    return best if candidates.is_single else at_next_grains(candidates, best)


def openings(candidates: Candidates, best: Recipe, rows: Sequence[settings.Opening]) -> Iterator[tuple[Recipe, bool]]:
    """Yield recipes at which further walks begin, if the user's settings allow them, and whether every grain is tried first."""
    for changes, scans_grains in rows:
        recipe = best._replace(**changes)
        if all(getattr(recipe, name) in candidates.values[name] for name in ("grain", "reach", "start")):
            yield recipe, scans_grains


def from_openings(candidates: Candidates, best: Candidate, fastest: Candidate) -> Candidate:
    """Descend from openings where the best does not fit, is far from what it would be with more memory, or is small.

    Args:
        fastest: without caps.
    """
    is_small = candidates.problem.num_stages * len(best.table) <= SMALL
    is_far = best.makespan_us > min(FAR * fastest.makespan_us, DISTANT * best.bound_us)
    if best.fits and not is_far and not is_small:
        return best
    before = best
    for recipe, scans_grains in openings(candidates, best.recipe, settings.OPENINGS[candidates.is_single]):
        opening = candidates.opening(recipe, before)
        if opening is not None:
            there = walk(candidates, opening, settings.EVERY_GRAIN) if scans_grains else opening
            there = descend(candidates, there, [setting for setting in settings.SETTINGS if setting.name != "cut"])
            best = min(best, there, key=attrgetter("key"))
    return best if best is before else descend(candidates, best)


def with_copies(candidates: Candidates, best: Candidate, fastest: Candidate) -> Candidate:
    """Walk with copies to the host, where they are allowed and more memory would make the plan clearly faster."""
    replicas = candidates.replicas
    if not replicas.can_offload or (best.fits and fastest.makespan_us >= WORTH * best.makespan_us):
        return best
    for recipe in recipes_with_copies(candidates, best, fastest):
        opening = candidates.opening(recipe, best, NEARLY * best.makespan_us)
        is_near = opening is not None and opening.makespan_us < NEARLY * best.makespan_us
        if opening is not None and (is_near or not best.fits):
            others = () if best.fits else map(candidates.of, (recipe._replace(grain=grain) for grain in settings.COPIES_GRAINS))
            there = min((opening, *(candidate for candidate in others if candidate is not None)), key=attrgetter("key"))
            there = descend(candidates, there, settings.WITH_COPIES[candidates.is_single]) if there.fits else there
            best = min(best, there, key=attrgetter("key"))
    if best.recipe.copies != "none" and best.makespan_us > DISTANT * fastest.makespan_us:
        best = walk(candidates, best, settings.LEAD)
    return best


def recipes_with_copies(candidates: Candidates, best: Candidate, fastest: Candidate) -> Iterator[Recipe]:
    """Yield the recipes at which walks with copies begin. An evaluation keeps keys and values alone, so copies these."""
    is_cut = candidates.options.slices is not None
    streaming = fastest.recipe if is_cut else fastest.recipe._replace(grain=settings.COPIES_GRAIN)
    for copies in settings.COPIES if candidates.options.kv_offload else settings.COPIES[:1]:
        if copies == "activations":
            begin = [fastest.recipe, best.recipe]
        else:
            narrow = {"lead": 0.0, "reach": candidates.values["reach"][0]}
            begin = [streaming] if best.fits else [streaming, streaming._replace(**narrow)]
        if not (candidates.problem.forward_only and copies != "keys"):
            yield from dict.fromkeys(recipe._replace(copies=copies) for recipe in begin)
