"""Candidates with copies to the host, and the walks of a search that try them: activations, keys and values, or both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import attrgetter

from megatron_epp.features.copies.ahead import fit_ahead, longest_lived_shares
from megatron_epp.features.copies.fit_copies import fit_offload
from megatron_epp.plan import Action, Chunk
from megatron_epp.plan.kv_offload import kv_offload_changes, slices_in
from megatron_epp.plan.problem import Problem
from megatron_epp.planner import settings
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.candidates import Candidate, Candidates, codes_of
from megatron_epp.planner.chunks.in_runs import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import Copies
from megatron_epp.planner.fit import least_peaks, peaks_bytes
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.kv_offload_tables import COPIES_SHARING, SHARINGS, Pairs, kv_offload_entries, with_kv_offload
from megatron_epp.planner.memory.offload import Copied, timed
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.completion import peaks, with_added
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.search import NEAR_RATIO, descend, walk
from megatron_epp.planner.settings import Recipe
from megatron_epp.planner.tables import Tables

ROUNDS = 4
"""Times that copies are chosen for ever lower caps. With 2 or 8 no plan of 24 differs."""
LEADS_RATIO = 1.02
"""Makespan with copies, as a multiple of the fastest without caps, above which other leads are tried."""
COPIES_RATIO = 0.992
"""Makespan without caps, as a share of the best, below which copies to the host are tried."""
COPIES_GRAINS = (3.0, 6.0, 12.0, 24.0, 48.0, 96.0, 128.0)
"""Grains that are tried with copies where nothing fits: a candidate that does not fit takes long to tell."""
COPIES_GRAIN = 6.0
"""Grain at which a walk with keys and values at the host begins: short slices compute too little to hide the copies."""


def with_copies(candidates: Candidates, best: Candidate, fastest: Candidate) -> None:
    """Walk with copies to the host, where they are allowed and more memory would make the plan clearly faster."""
    replicas = candidates.replicas
    if not replicas.can_offload or (best.fits and fastest.makespan_us >= COPIES_RATIO * best.makespan_us):
        return
    for recipe in recipes_with_copies(candidates, best, fastest):
        opening = candidates.opening(recipe, best, NEAR_RATIO * best.makespan_us)
        is_near = opening is not None and opening.makespan_us < NEAR_RATIO * best.makespan_us
        if opening is not None and (is_near or not best.fits):
            other = opening
            for grain in () if best.fits else COPIES_GRAINS:
                tried = candidates.of(recipe._replace(grain=grain), other.makespan_us)
                other = min(other, tried or other, key=attrgetter("key"))
            other = descend(candidates, other, candidates.orders.with_copies) if other.fits else other
            best = min(best, other, key=attrgetter("key"))
    if best.recipe.copies != "none" and best.makespan_us > LEADS_RATIO * fastest.makespan_us:
        walk(candidates, best, settings.LEAD)


def recipes_with_copies(candidates: Candidates, best: Candidate, fastest: Candidate) -> Iterator[Recipe]:
    """Yield the recipes at which walks with copies begin. An evaluation keeps keys and values alone, so copies these."""
    is_cut = candidates.options.slices is not None
    streaming = fastest.recipe if is_cut else fastest.recipe._replace(grain=COPIES_GRAIN)
    for copies in settings.COPIES if candidates.options.kv_offload else settings.COPIES[:1]:
        if copies == "activations":
            begin = [fastest.recipe, best.recipe]
        else:
            narrow = {"lead": 0.0, "reach": candidates.values["reach"][0]}
            begin = [streaming] if best.fits else [streaming, streaming._replace(**narrow)]
        if not (candidates.problem.forward_only and copies != "keys"):
            yield from dict.fromkeys(recipe._replace(copies=copies) for recipe in begin)


def copied(
    candidates: Candidates, unfitted: Candidate, ordered: tuple[Decisions, ...], tables: Sequence[Tables], limit_us: float
) -> Iterator[Candidate]:
    yield unfitted
    copying, replicas = _Copying(candidates, unfitted, limit_us), candidates.replicas
    copies, order, table = unfitted.recipe.copies, ordered[0].order, unfitted.table
    if copies == "activations":
        room = [[problem.host_cap_bytes] * problem.num_ranks for problem in replicas.problems]
        yield from copying.activations(ordered, tables, room)
        return
    for pairs in choices(replicas, order, tables, table):
        if copies == "both" and not any(pairs):
            continue  # with keys alone, chunks cut for the copies may fit as they are where those of other recipes do not
        away = tuple(replace(decisions, kv_offload=own) for decisions, own in zip(ordered, pairs, strict=True))
        room = host_room(replicas, order, table, pairs)
        if copies == "both":
            yield copying.both(away, tables, room)
            continue
        own_tables = replicas.kv_offload(tables, table, pairs)
        if (short := -min(map(min, room))) <= 0:
            yield from candidates.recomputed(unfitted, away, own_tables)
        elif replicas.fit(codes_of(ordered), own_tables).recompute_steps is not None:
            candidates.note_host_bytes(short)  # it would fit with more at the host


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies of activations for a candidate that does not take longer than a limit; `room` is ``[replica][rank]``."""

    candidates: Candidates
    unfitted: Candidate
    limit_us: float

    def both(self, away: tuple[Decisions, ...], tables: Sequence[Tables], room: list[list[int]]) -> Candidate:
        """Copy activations besides keys and values, with the link no slower for these than the copies make it."""
        pairs, best = tuple(decisions.kv_offload for decisions in away), self.unfitted
        for sharing in SHARINGS:
            own = tuple(replace(decisions, kv_sharing=sharing) for decisions in away)
            own_tables = self.candidates.replicas.kv_offload(tables, self.unfitted.table, pairs, sharing)
            if max(lower_bound_us(of, options=self.candidates.options) for of in own_tables) >= self.limit_us:
                break  # streams for too long, whatever is copied besides
            best = min(self.activations(own, own_tables, room), key=attrgetter("key"), default=self.unfitted)
            every = zip(best.decisions, own_tables, strict=best.fits)
            if all(leaves_link(timed(decisions.as_offload, of), of, best.makespan_us, sharing) for decisions, of in every):
                break
        return best

    def activations(
        self, ordered: tuple[Decisions, ...], tables: Sequence[Tables], room: list[list[int]]
    ) -> Iterator[Candidate]:
        """Copy activations where a cap requires it, and without KV offload ahead of that, as the link has time.

        The vocabulary's shards move actions after copies were chosen. Where that takes a rank above its cap, because bytes are
        away at other times, copies are chosen again for a lower one.
        """
        order, aims = ordered[0].order, self.candidates.problem.cap_bytes
        for _ in range(ROUNDS):
            candidate, above = self.complete(ordered, tables, fit_offload(order, tables, aims, room))
            if not any(above):
                yield candidate
                break
            aims = tuple(aim - excess for aim, excess in zip(aims, above, strict=True))
        if not (self.candidates.replicas.is_lockstep or ordered[0].kv_offload):
            shares, caps = longest_lived_shares(tables[0]), self.candidates.problem.cap_bytes
            ahead = fit_ahead(order, tables[0], caps, room[0], shares, self.limit_us)
            candidate, above = self.complete(ordered, tables, ahead)
            if not any(above):
                yield candidate

    def complete(
        self, ordered: tuple[Decisions, ...], tables: Sequence[Tables], copied: Copied | None
    ) -> tuple[Candidate, list[int]]:
        """Complete the candidate with copies, where there are any and the host has room for them.

        Returns it and the bytes by which each rank is above its cap. Weight gradients stay in their backwards where they would
        take a rank above its cap by themselves.
        """
        candidates, candidate, above = self.candidates, self.unfitted, [0] * self.candidates.problem.num_ranks
        if copied is not None and copied.short_bytes:
            candidates.note_host_bytes(copied.short_bytes)
        elif copied is not None:
            for splits in (True, False) if candidates.splits else (False,):
                candidate = candidates.complete(self.unfitted, ordered, tables, copied.makespan_us, copied.offloads, splits)
                above = above_caps(candidates.replicas, candidate.decisions, tables)
                if not any(above):
                    break
        return candidate, above


def choices(replicas: Replicas, order: Order, tables: Sequence[Tables], table: Aligned) -> Iterator[tuple[Pairs, ...]]:
    """List what may be offloaded of keys and values in every replica: what it takes to fit, and what avoids recompute."""
    by_replica = [_choices(replicas, order, *each) for each in zip(tables, table.chunks, replicas.problems, strict=True)]
    return iter(dict.fromkeys(zip(*by_replica, strict=True)))


def host_room(replicas: Replicas, order: Order, table: Aligned, pairs: tuple[Pairs, ...]) -> list[list[int]]:
    """Compute the bytes left in host memory besides KV offload, ``[replica][rank]``; below zero where there are too few."""
    rooms = []
    for chunks, problem, mine in zip(table.chunks, replicas.problems, pairs, strict=True):
        entries, changes = kv_offload_entries(chunks, problem, replicas.costs, mine), Counter[tuple[Action, bool]]()
        slices = slices_in(chunks, problem.lengths, problem.borrowed)
        for action, at_end, size in kv_offload_changes(entries, slices, problem.forward_only):
            changes[action, at_end] += size
        rows = (accumulate((changes[each] for each in product(row, (False, True))), initial=0) for row in order)
        rooms.append([problem.host_cap_bytes - max(row) for row in rows])
    return rooms


def above_caps(replicas: Replicas, by_replica: Sequence[Decisions], tables: Sequence[Tables]) -> list[int]:
    """Return the bytes by which the vocabulary's shards take each rank above its cap; 0 where it fits, or has none."""
    caps = replicas.problems[0].cap_bytes
    if not replicas.has_shards:
        return [0] * len(caps)
    every = [
        peaks(with_added(decisions.order, own, decisions.recompute_steps), own, decisions.as_offload)
        for decisions, own in zip(by_replica, tables, strict=True)
    ]
    return [max(0, max(peak_bytes) - cap) for *peak_bytes, cap in zip(*every, caps, strict=True)]


def _choices(
    replicas: Replicas, order: Order, tables: Tables, chunks: Sequence[Chunk], problem: Problem
) -> tuple[Pairs, Pairs]:
    """Choose stages and sequences for KV offload; none where no rank lacks memory or none of its sequences is cut.

    Returns two choices: on every rank that is above its cap even when all recomputes, the largest caches, until it is not; and
    in addition to these all pairs of every rank that recomputes anything.
    """
    sizes = _sizes(tables, chunks, problem)
    codes = encode(order, len(chunks))
    caps, recomputing = problem.cap_bytes, peaks_bytes(codes, tables, [[0] * len(chunks) for _ in tables.rank_of])
    needed: Pairs = frozenset()
    above = [rank for rank, peak in enumerate(least_peaks(codes, tables)) if peak > caps[rank]]
    count = 1
    while above:
        more = {pair for rank in above for pair in sizes[rank][:count]}
        if needed | more == needed:
            break
        needed |= more
        now = with_kv_offload(tables, chunks, problem, replicas.costs, replicas.modes, needed, in_order=replicas.is_lockstep)
        above = [rank for rank, peak in enumerate(least_peaks(codes, now)) if peak > caps[rank]]
        count *= 2
    return needed, needed.union(*(sizes[rank] for rank, peak in enumerate(recomputing) if peak > caps[rank]))


def _sizes(tables: Tables, chunks: Sequence[Chunk], problem: Problem) -> list[list[tuple[int, int]]]:
    slices = slices_in(chunks, problem.lengths, problem.borrowed)

    def largest_first(pair: tuple[int, int]) -> tuple[int, tuple[int, int]]:
        return -int(tables.passes[pair[0]].forward_alloc[slices[pair[1]][0]]), pair

    return [sorted(product(stages, slices), key=largest_first) for stages in tables.stages_of]


def leaves_link(copies: Copies, tables: Tables, makespan_us: float, sharing: float) -> bool:
    """Return True if copies of activations take no more than half of the time on each link that `sharing` leaves them.

    Half: they are not spread evenly, and passes that run meanwhile have less of the link than the average.
    """
    took_us = dict.fromkeys(tables.host_links, 0.0)
    for link, row in zip(tables.host_links, copies, strict=True):
        took_us[link] += sum(time_us for _, time_us, _ in row) / COPIES_SHARING
    return max(took_us.values()) <= (1 - 1 / sharing) / 2 * makespan_us
