"""Candidates: a chunk table in a schedule, with the recompute or copies that let it fit. The fastest is kept."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Remedy
from megatron_epp.plan.errors import format_gib
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.kernels.columns import encode
from megatron_epp.planner.memory.kv_offload import SHARING, Pairs, with_hosted
from megatron_epp.planner.memory.kv_offload_choice import at_host, choices
from megatron_epp.planner.memory.offload import fit_offload
from megatron_epp.planner.memory.recompute import fit_recompute
from megatron_epp.planner.orders.list_scheduling import Listing
from megatron_epp.planner.orders.warm_up import Order, Schedule
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables, tabulate

CLEARLY = 0.99
"""While nothing fits, a grain counts as better when its least peak is below this share of the least before."""

CLOSE = 0.005
"""Relative gain in makespan below which a table is not worth another try."""
NEAR = 4
"""Number of candidates without copies that are kept, the fastest."""
WORTH = 0.985
"""Share of the best makespan so far below which the bound with offload must lie for it to be tried."""


class Trials:
    """Candidates tried so far, and the best of them."""

    def __init__(self, problem: Problem, costs: Costs, options: Options) -> None:
        self.problem, self.costs, self.options = problem, costs, options
        self.levels = options.levels(costs)
        self.best: Decisions | None = None
        self.best_us = math.inf
        self._near: list[tuple[float, Decisions]] = []
        self.schedule: Schedule | Listing | None = None
        self.least_cap = self.least_host = 0
        self.seen: set[tuple[tuple[Chunk, ...], Schedule | Listing]] = set()

    def better(self, chunks: tuple[Chunk, ...], schedules: Sequence[Schedule | Listing], close: float = CLOSE) -> bool:
        """Try a table. True if it is faster than all before, or, while none fits, if it needs clearly less memory.

        Args:
            chunks: the chunk table.
            schedules: the orders to try.
            close: relative gain below which a table, by its lower bound, is not tried further.
        """
        schedules = [schedule for schedule in schedules if (chunks, schedule) not in self.seen]
        if not schedules:
            return False
        tables = tabulate(chunks, self.problem, self.costs, self.levels)
        bound_us = lower_bound_us(tables, chunks, self.problem, self.options)
        found = False
        for schedule in schedules:
            if bound_us * (1 + close) >= self.best_us:
                break
            found |= self._better(chunks, tables, schedule)
        return found

    def _better(self, chunks: tuple[Chunk, ...], tables: Tables, schedule: Schedule | Listing) -> bool:
        self.seen.add((chunks, schedule))
        order = self._order(chunks, tables, schedule)
        codes = encode(order, len(chunks))
        fit = fit_recompute(codes, tables, self.problem.cap_bytes, self.options)
        if fit.layers is None:
            before = self.least_cap or math.inf
            self.least_cap = int(min(before, fit.needed_bytes))
            return self.best is None and fit.needed_bytes < CLEARLY * before
        took_us, made = makespan_us(codes, tables, fit.layers), Decisions(chunks, order, fit.layers, self.levels)
        insort(self._near, (took_us, made), key=itemgetter(0))
        del self._near[NEAR:]
        if took_us >= self.best_us:
            return False
        self.best, self.best_us, self.schedule = made, took_us, schedule
        return True

    @property
    def near(self) -> list[Decisions]:
        """The fastest without copies, the best among them, fastest first."""
        return [made for _, made in self._near]

    def better_with_copies(self, chunks: tuple[Chunk, ...], schedules: Sequence[Schedule | Listing]) -> bool:
        """Try a table with offload; True if it is faster than all before.

        Where the best so far is close to what offload could reach at most, it is not tried: it takes longer than all else.
        """
        tables = tabulate(chunks, self.problem, self.costs, self.levels)
        bound_us = lower_bound_us(tables, chunks, self.problem, self.options)
        found = False
        for schedule in schedules:
            if bound_us < WORTH * self.best_us:
                found |= self._copied(chunks, self._order(chunks, tables, schedule), tables)
        return found

    def better_hosted(self, chunks: tuple[Chunk, ...], schedule: Schedule | Listing) -> bool:
        """Try a table with KV offload, alone and combined with offload of activations; True if it is faster than all before.

        While nothing fits, it is tried without KV offload too, for it is a table of its own.
        """
        plain = tabulate(chunks, self.problem, self.costs, self.levels)
        order = self._order(chunks, plain, schedule)
        codes = encode(order, len(chunks))
        found = False
        for pairs in dict.fromkeys(choices(order, plain, chunks, self.problem, self.costs, self.levels)):
            if not pairs and self.best is not None:
                continue
            short = max(at_host(order, chunks, self.problem, self.costs, pairs)) - self.problem.host_cap_bytes
            if short > 0 and self.best is not None:
                continue
            given = chunks, self.problem, self.costs, self.levels, pairs
            tables, shared = (with_hosted(plain, *given, sharing) for sharing in (1.0, SHARING))
            if busiest_us(tables) >= self.best_us:
                continue
            fit = fit_recompute(codes, tables, self.problem.cap_bytes, self.options)
            if fit.layers is None:
                if short <= 0:  # else no cap would do with this host
                    self.least_cap = int(min(self.least_cap or math.inf, fit.needed_bytes))
            elif short > 0:
                self._needs_host(short)
            elif (took_us := makespan_us(codes, tables, fit.layers)) < self.best_us:
                self.best, self.best_us = Decisions(chunks, order, fit.layers, self.levels, hosted=pairs), took_us
                found = True
            if not self.problem.forward_only and busiest_us(shared) < WORTH * self.best_us:
                found |= self._copied(chunks, order, shared, pairs)
        return found

    def _copied(self, chunks: tuple[Chunk, ...], order: Order, tables: Tables, pairs: Pairs = frozenset()) -> bool:
        """Try offload of activations combined with the KV offload of `pairs`, as tabulated; True if it is the fastest."""
        hosted = at_host(order, chunks, self.problem, self.costs, pairs)
        made = fit_offload(order, (tables,), self.problem.cap_bytes, [[self.problem.host_cap_bytes - size for size in hosted]])
        if made is not None and made.short_bytes:
            self._needs_host(made.short_bytes)
            return False
        if made is None or made.makespan_us >= self.best_us:
            return False
        self.best_us, (beside,), _ = made
        decided = Decisions(chunks, order, beside.layers, self.levels, copies=beside.copies, offload=beside.shares)
        self.best = replace(decided, hosted=pairs)
        return True

    def _needs_host(self, short_bytes: int) -> None:
        """Record that a candidate would fit if the host had so many bytes more."""
        self.least_host = int(min(self.least_host or math.inf, self.problem.host_cap_bytes + short_bytes))

    def _order(self, chunks: tuple[Chunk, ...], tables: Tables, schedule: Schedule | Listing) -> Order:
        if isinstance(schedule, Listing):
            return schedule.order(chunks, tables)
        return schedule(chunks, self.problem.num_stages, self.problem.forward_only)

    def result(self, planner: str = "greedy") -> Decisions:
        """Return the best decisions. Raises `InfeasibleError` with the smallest caps that would have let one table through."""
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, self.least_cap, self.least_host, planner)


def busiest_us(tables: Tables) -> float:
    """Time of the rank with the most work, in microseconds, without recompute."""
    passes = [tables.forward_us, tables.backward_us] if tables.backward_us else [tables.forward_us]
    return max(sum(sum(times[stage]) for times in passes for stage in stages) for stages in tables.stages_of)


def infeasible(problem: Problem, least_cap: int, least_host: int = 0, planner: str = "greedy") -> InfeasibleError:
    """Build the error of a batch that fits no cap.

    Args:
        problem: the batch.
        least_cap: bytes of each rank that would suffice.
        least_host: bytes of each rank at the host that would suffice, with the caps as they are; 0 where none would.
        planner: name of the planner, for the message.
    """
    remedies, beside = [Remedy("raise", "cap_bytes", least_cap)], ""
    if least_host:
        remedies.append(Remedy("raise", "host_cap_bytes", least_host))
        in_gib = format_gib(least_host)
        beside = f", or {least_host} bytes ({in_gib} GiB) at the host, where it may have {problem.host_cap_bytes}"
    if planner == "greedy":
        whose, instead = "", (Remedy("lower", "chunk_tokens"), Remedy("lower", "context"))
    else:
        whose, instead = f" of {planner!r}", (Remedy("lower", "context"), Remedy("set", "planner", "greedy"))
    return InfeasibleError(
        f"no plan{whose} fits a memory cap of {min(problem.cap_bytes)} bytes per rank: the least that would do is "
        f"{least_cap} bytes ({format_gib(least_cap)} GiB){beside}.\n",
        *remedies,
        *instead,
        least_cap_bytes=least_cap,
    )
