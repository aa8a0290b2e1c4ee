"""Candidates: a chunk table in an order, with the recompute or copies that let it fit. The fastest is kept."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from megatron_epp.plan import Chunk
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.kernels.codes import CodedOrder, Key, coded
from megatron_epp.planner.memory.ahead import fit_ahead, longest_lived_shares
from megatron_epp.planner.memory.kv_offload import SHARING, Pairs
from megatron_epp.planner.memory.offload import Copied, Offload, fit_offload
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.complete import completed
from megatron_epp.planner.orders.split_weight import peaks
from megatron_epp.planner.orders.warm_up import OrderRule
from megatron_epp.planner.search.order_rules import rules_for
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.work import spend

CLEARLY = 0.99
"""While nothing fits, a grain counts as better when its least peak is below this share of the least before. Not measured: with
1 the search would go on to ever finer grains for a few bytes.
"""
CLOSE = 0.005
"""Relative gain in makespan below which a table is not worth another try. With 0 two plans of 70 faster by 0.01 %; with 0.02 no
plan of 70 changes (see `grains`).
"""
WORTH = 0.992
"""Share of the best makespan so far below which the bound with offload must lie for it to be tried. With 0.985 a tenth more
memory could make a plan slower by 1.5 %.
"""
PROVEN = 1e-9
"""Relative excess of a bound over the best makespan that proves, rounding included, that a candidate is no better."""
NEARLY = 1.05
"""Makespan, as a share of the best, up to which a rule for several stages per rank goes on while it gets better itself. With
1.0 or 1.2 no plan of 70 changes.
"""
ROUNDS = 4
"""Times that copies are chosen again for lower caps. Not measured: a candidate that is above a cap after the last is dropped.
"""
CHOICES = 8
"""Number of candidates that are tried again where messages take more memory than was set aside, the fastest. With 2 no plan of
70 changes.
"""
NEAR = 4
"""Number of candidates without copies that are kept, the fastest. With 1 or 12 no plan of 70 changes."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk table in an order, with what was decided to let it fit.

    Attributes:
        table: the chunk tables of all replicas.
        rule: what ordered them.
        made: the decisions of every replica; order and recompute are the same in all.
        tables: times and sizes of every replica.
        makespan_us: of all replicas, of the complete order.
        complete: the order with the vocabulary's shards and with weight gradients split off; empty where there is neither.
    """

    table: Aligned
    rule: OrderRule
    made: tuple[Decisions, ...]
    tables: tuple[Tables, ...] = field(repr=False, compare=False)
    makespan_us: float = math.inf
    complete: Order = field(default=(), repr=False, compare=False)

    @property
    def order(self) -> CodedOrder:
        return coded(self.made[0].order, len(self.made[0].chunks))

    @property
    def only(self) -> Decisions:
        """The decisions of the only replica."""
        (made,) = self.made
        return made

    def kv_offload(self, pairs: tuple[Pairs, ...], tables: tuple[Tables, ...]) -> Candidate:
        """Return the candidate with the keys and values of `pairs` in host memory, as tabulated."""
        made = tuple(replace(one, kv_offload=mine) for one, mine in zip(self.made, pairs, strict=True))
        return replace(self, made=made, tables=tables)

    def decided(self, makespan_us: float, offloads: Sequence[Offload]) -> Candidate:
        """Return the candidate with recompute and copies.

        Args:
            makespan_us: with them.
            offloads: of every replica; without copies these are the recompute alone.
        """
        every = zip(self.made, offloads, strict=True)
        made = tuple(
            replace(one, recompute_steps=own.recompute_steps, copies=own.copies, offload=own.shares) for one, own in every
        )
        return replace(self, made=made, makespan_us=makespan_us)


class Choice(NamedTuple):
    """Table and rule of a candidate.

    Attributes:
        table: the chunk table.
        rule: what ordered it.
        with_copies: activations were offloaded.
    """

    table: Aligned
    rule: OrderRule
    with_copies: bool = False


class Trials:
    """Candidates tried so far, and the best of them.

    A candidate is passed over if by the lower bound it is hardly faster than the best (of lockstep replicas: no faster).

    Attributes:
        best: the fastest that fits; None while none does.
        best_us: its makespan, or a makespan to beat.
        best_of: the fastest without copies by what ordered it.
        fastest_us: makespan of the fastest without copies of every table that fits.
        whole: the fastest that fits before its order is completed, and without copies, where orders are completed.
        near: the fastest without copies, the best among them, fastest first.
        least_cap: smallest cap, in bytes, that would have let a candidate through; 0 where memory was never the obstacle.
        least_host: the same for the memory in host memory.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.replicas, self.problem = replicas, replicas.problems[0]
        self.is_split = replicas.splits_weight and not replicas.is_lockstep
        self.has_shards = replicas.has_shards
        self.rules = rules_for(self.problem, self.is_split, self.has_shards)
        self.best: Candidate | None = None
        self.best_us = math.inf
        self.whole: Candidate | None = None
        self.near: list[Candidate] = []
        self.least_cap = self.least_host = 0
        self.seen: set[tuple[Aligned, OrderRule]] = set()
        self._orders: dict[Aligned, set[Key]] = {}  # by key, for several stages per rank, where rules may agree
        self.best_of: dict[OrderRule, Candidate] = {}
        self.fastest_us: dict[Aligned, float] = {}
        self._last: tuple[Aligned, tuple[Tables, ...]] | None = None
        self._stand_in: tuple[Aligned, tuple[Chunk, ...]] | None = None  # of the last table that was ordered
        self._worth = 1 + PROVEN if replicas.is_lockstep else WORTH

    def better(self, table: Aligned | None, rules: Iterable[OrderRule], close: float = CLOSE) -> bool:
        """Try a table. True if it is faster than all before, or, while none fits, if it needs clearly less memory.

        With several stages per rank also True where a rule is faster than before itself, and nearly as fast as the best: then
        other tables may make it the best.

        Args:
            table: the chunk table; nothing is tried where there is none.
            rules: the order rules to try.
            close: relative gain below which a table, by its lower bound, is not tried further.
        """
        rules = [rule for rule in rules if (table, rule) not in self.seen]
        if table is None or not rules:
            return False
        tables, bound_us = self._tables(table), 0.0
        close = -PROVEN if self.replicas.is_lockstep else close
        found, orders = False, self._orders.setdefault(table, set())
        for rule in rules:
            if self.best_us < math.inf and not bound_us:  # without a best, as where memory is asked for, no bound is needed
                bound_us = self.replicas.bound_us(tables, table)
            if bound_us * (1 + close) >= self.best_us:
                break
            self.seen.add((table, rule))
            tried = self._ordered(table, tables, rule)
            if not self.problem.has_one_stage_per_rank:
                if (key := tried.order.key) in orders:
                    continue
                orders.add(key)
            found |= self._better(tried)
        return found

    def choices(self) -> list[Choice]:
        """Return the tables and rules of the fastest candidates: of the best, if it has copies, and of fast ones without."""
        best = [] if self.best is None or not any(one.copies for one in self.best.made) else [self.best]
        plain = sorted(self.best_of.values(), key=attrgetter("makespan_us"))[:CHOICES]
        return [Choice(one.table, one.rule, one in best) for one in (*best, *plain)]

    def retry(self, choices: Iterable[Choice]) -> list[Candidate]:
        """Try candidates of a search with less memory set aside for messages; return the best, without copies and with them.

        Args:
            choices: of that search.
        """
        found: list[Candidate] = []
        for with_copies in (False, True):
            for one in choices:
                if one.with_copies == with_copies:
                    (self.better_with_copies if with_copies else self.better)(one.table, (one.rule,))
            found += [self.best] if self.best is not None and self.best not in found else []
        return found

    def may_be_better(self, table: Aligned, factor: float = 1.0) -> bool:
        """Return False if the lower bound of a table, times a factor, is no less than the best makespan so far.

        Args:
            table: the chunk table.
            factor: with 1, False proves that no order of the table is faster.
        """
        return math.isinf(self.best_us) or factor * self.replicas.bound_us(self._tables(table), table) < self.best_us

    def narrow(self, table: Aligned) -> tuple[OrderRule, ...]:
        """Return rules with narrower windows for a table: all if no candidate of it fits, one if it is nearly the best."""
        fastest_us = self.fastest_us.get(table, math.inf)
        if math.isinf(fastest_us):
            return self.rules.narrow
        return self.rules.narrow[:1] if fastest_us <= NEARLY * self.best_us else ()

    def _tables(self, table: Aligned) -> tuple[Tables, ...]:
        """Tabulate a table without KV offload, unless the best candidate has it or it was the last one."""
        best = self.best
        if best is not None and best.table == table and not any(made.kv_offload for made in best.made):
            return best.tables
        if self._last is None or self._last[0] != table:
            self._last = table, self.replicas.tables(table)
        return self._last[1]

    def _better(self, tried: Candidate) -> bool:
        before = self.least_cap or math.inf
        if (found := self._recomputed(tried)) is None:
            return self.best is None and self.least_cap < CLEARLY * before and not self.replicas.is_lockstep
        self.fastest_us[tried.table] = min(found.makespan_us, self.fastest_us.get(tried.table, math.inf))
        insort(self.near, found, key=attrgetter("makespan_us"))
        del self.near[NEAR:]
        own = self.best_of.get(tried.rule)
        is_better = own is None or found.makespan_us < own.makespan_us
        if is_better:
            self.best_of[tried.rule] = found
        is_near = not self.problem.has_one_stage_per_rank and found.makespan_us <= NEARLY * self.best_us
        return self._keep(found) or (is_better and is_near)

    def better_with_copies(self, table: Aligned, rules: Iterable[OrderRule]) -> bool:
        """Try a table with offload; True if it is faster than all before.

        Where the best so far is close to what offload could reach at most, it is not tried: it takes longer than all else.
        """
        tables = self._tables(table)
        bound_us = self.replicas.bound_us(tables, table)
        found = False
        for rule in dict.fromkeys(rules):
            if bound_us < self._worth * self.best_us:
                found |= self._copied(self._ordered(table, tables, rule))
        return found

    def better_with_kv_offload(self, table: Aligned | None, rule: OrderRule) -> bool:
        """Try a table with KV offload, alone and combined with offload of activations; True if it is faster than all before.

        While nothing fits, it is tried without KV offload too, for it is a table of its own.
        """
        if table is None:
            return False
        plain, found = self._ordered(table, self.replicas.tables(table), rule), False
        for pairs in self.replicas.choices(plain.order, plain.tables, table):
            if not any(pairs) and self.best is not None:
                continue
            short = -min(map(min, self.replicas.host_room(plain.order, table, pairs)))
            if short > 0 and self.best is not None:
                continue
            alone, shared = (
                plain.kv_offload(pairs, self.replicas.kv_offload(plain.tables, table, pairs, sharing))
                for sharing in (1.0, SHARING)
            )
            if busiest_us(alone.tables[0]) >= self.best_us:
                continue
            if (fits := self._recomputed(alone, counts=short <= 0)) is not None:
                if short > 0:
                    self._needs_host(short)
                else:
                    found |= self._keep(fits)
            if not self.problem.forward_only and busiest_us(shared.tables[0]) < self._worth * self.best_us:
                found |= self._copied(shared)
        return found

    def _ordered(self, table: Aligned, tables: tuple[Tables, ...], rule: OrderRule) -> Candidate:
        spend(self.problem.num_stages * len(table))
        if self._stand_in is None or self._stand_in[0] is not table:
            self._stand_in = table, table.stand_in(self.problem.loss_groups)
        order = coded(rule.order(self._stand_in[1], tables[0], self.problem), len(table))
        made = tuple(Decisions(chunks, order, [], self.replicas.modes) for chunks in table.chunks)
        return Candidate(table, rule, made, tables)

    def _recomputed(self, tried: Candidate, counts: bool = True) -> Candidate | None:
        """Fit recompute to the caps; where none does, the cap that would do counts unless the host has no room for it.

        With several stages per rank, whose chunks stay for times of different lengths, two ways to choose it are tried. Copies
        and steps of local search know the first alone.
        """
        codes = tried.order.codes
        fit = self.replicas.fit(codes, tried.tables)
        if fit.recompute_steps is None:
            if counts:
                self.least_cap = int(min(self.least_cap or math.inf, fit.needed_bytes))
            return None
        found = [fit.recompute_steps]
        is_fixed = self.replicas.options.recompute != "auto"
        if any(map(any, fit.recompute_steps)) and not is_fixed and not self.problem.has_one_stage_per_rank:
            other = self.replicas.fit(codes, tried.tables, by_stay=True).recompute_steps
            found += [other] if other is not None and other != fit.recompute_steps else []
        return min((self._complete_with(tried, steps) for steps in found), key=attrgetter("makespan_us"))

    def _complete_with(self, tried: Candidate, steps: RecomputeSteps) -> Candidate:
        whole_us = makespan_us(tried.order.codes, tried.tables[0], steps)
        whole = tried.decided(whole_us, [Offload(steps, (), ())] * len(tried.made))
        if (self.is_split or self.has_shards) and (self.whole is None or whole.makespan_us < self.whole.makespan_us):
            self.whole = whole
        return self._completed(whole)

    def _copied(self, tried: Candidate) -> bool:
        """Try offload of activations besides the candidate's KV offload, as tabulated; True if it is the fastest.

        Copies are made where a cap requires them, and, for a single replica, ahead of that, as the link has time for them.
        """
        room = self.replicas.host_room(tried.order, tried.table, tuple(one.kv_offload for one in tried.made))
        found = self._copied_when_needed(tried, room)
        return found if self.replicas.is_lockstep else self._copied_ahead(tried, room[0]) or found

    def _copied_when_needed(self, tried: Candidate, room: Sequence[Sequence[int]]) -> bool:
        """Try copies that the caps require; True if they make the fastest.

        With shards of the vocabulary actions move after copies were chosen, so bytes are away at other times. If a rank comes
        out above its cap, copies are chosen again for a lower one.
        """
        aims = self.problem.cap_bytes
        for _ in range(ROUNDS):
            candidate = self._with_copies(tried, fit_offload(tried.order, tried.tables, aims, room))
            if candidate is None:
                return False
            above = self._above(candidate)
            if max(above) <= 0:
                return self._keep(candidate)
            aims = tuple(aim - max(0, over) for aim, over in zip(aims, above, strict=True))
        return False

    def _copied_ahead(self, tried: Candidate, room: Sequence[int]) -> bool:
        """Try copies of all that the link has time for; True if they make the fastest."""
        (tables,) = tried.tables
        limit_us = self.best_us * (NEARLY if self.is_split or self.has_shards else 1.0)  # completion makes orders faster
        shares = longest_lived_shares(tables)
        found = fit_ahead(tried.order, tables, self.problem.cap_bytes, room, shares, limit_us)
        candidate = self._with_copies(tried, found)
        return candidate is not None and max(self._above(candidate)) <= 0 and self._keep(candidate)

    def _with_copies(self, tried: Candidate, found: Copied | None) -> Candidate | None:
        """Complete a candidate with the copies found; None where there are none or the host has no room for them."""
        if found is None:
            return None
        if found.short_bytes:
            self._needs_host(found.short_bytes)
            return None
        return self._completed(tried.decided(found.makespan_us, found.made))

    def _above(self, found: Candidate) -> list[int]:
        """Bytes by which a candidate with copies is above each cap when its order is complete; 0 or less if it fits."""
        if not self.has_shards:
            return [0] * self.problem.num_ranks
        every = [peaks(found.complete, own, made.as_offload) for own, made in zip(found.tables, found.made, strict=True)]
        return [max(sizes) - cap for *sizes, cap in zip(*every, self.problem.cap_bytes, strict=True)]

    def _completed(self, found: Candidate) -> Candidate:
        """Insert the vocabulary's shards, if any, and split weight gradients off where that is asked for and faster."""
        if not self.is_split and not self.has_shards:
            return found
        tables, made = found.tables[0], found.made[0].as_offload
        enough_us = self.replicas.bound_us(found.tables, found.table) * (1 + CLOSE) if self.is_split else math.inf
        order, took_us = completed(found.order, tables, made, self.problem.cap_bytes, self.is_split, enough_us)
        return replace(found, complete=order, makespan_us=took_us)

    def _keep(self, found: Candidate) -> bool:
        """Keep what is found if it is the fastest; True if it is."""
        if found.makespan_us >= self.best_us:
            return False
        self.best, self.best_us = found, found.makespan_us
        return True

    def _needs_host(self, short_bytes: int) -> None:
        """Record that a candidate would fit if the host had so many bytes more."""
        self.least_host = int(min(self.least_host or math.inf, self.problem.host_cap_bytes + short_bytes))

    def result(self, planner: str = "greedy") -> Candidate:
        """Return the best. Raises `InfeasibleError` with the smallest caps that would have let a candidate through."""
        if self.best is not None:
            return self.best
        replicas = self.replicas
        raise infeasible(self.problem, replicas.costs, replicas.options, self.least_cap, self.least_host, planner)


def busiest_us(tables: Tables) -> float:
    """Time of the rank with the most work, in microseconds, without recompute."""
    return max(tables.busy_us(rank, tables.backward_us) for rank in range(len(tables.stages_of)))
