"""Schedules that are an order of actions for any chunk table, as planners: the fastest chunk table whose plan fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from megatron_epp.contrib.overlap.joined import JoinedDecisions, JoinedOrder, adjacent
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Op, PlanError
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.operations import Presence, operation
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.order import Order, slice_groups

CHUNKS_PER_RANK = (2, 4, 6, 8, 12, 16, 24, 32)
"""Grains that every order is tried with, besides whole sequences: chunks of a table as multiples of the ranks."""


ChunkTable = tuple[Chunk, ...]


def several_grains(problem: Problem, costs: Costs, options: Options) -> Iterator[ChunkTable]:
    """Yield whole sequences and several grains, or the table with the slices asked for."""
    slicer = Slicer.of(problem, costs, options.chunk_tokens)
    if options.slices is not None:
        yield slicer.table(slicer.grain(slices=options.slices))
        return
    grains = [slicer.grain(chunks=share * problem.num_ranks) for share in CHUNKS_PER_RANK]
    yield from dict.fromkeys(slicer.table(grain) for grain in (slicer.grain(slices=1), *grains))


class Batch(NamedTuple):
    """Input of an order."""

    chunks: Sequence[Chunk]  # the chunk table
    groups: Sequence[range]  # `slice_groups` of the table: a range for each sliced sequence and each single chunk
    placement: Placement  # of the stages
    # problem, costs: as planners take them
    problem: Problem
    costs: Costs

    @property
    def num_chunks(self) -> int:
        return len(self.chunks)

    @property
    def most_slices(self) -> int:
        return max(map(len, self.groups))


@dataclass(frozen=True, slots=True)
class FixedOrder:
    """Planner of a schedule that papers state as an order of equal microbatches.

    Here the microbatches are the chunks of a table, slices of long sequences included, and windows are fixed by the sequence
    with the most slices. The order is tried with several chunk tables, each with the recompute and the copies that the caps
    require (`fitted`), and the fastest plan counts. Without `Options.split_weight` weight gradients run with their backwards.
    """

    # Returns the orders to try; raises `PlanError` if the schedule has none for the batch
    orders: Callable[[Batch], Iterable[Order | JoinedOrder]]
    kind: Literal["looped", "v"] = "looped"  # of the placement
    chunks_per_rank: int | None = 1  # stages of each rank; None for two or more
    # Returns the chunk tables to try, in order; raises `PlanError` if the schedule has none for the batch
    tables: Callable[[Problem, Costs, Options], Iterable[ChunkTable]] = several_grains
    # Chooses recompute and copies for an order, as `fitted` does
    fit: Callable[[Order, Sequence[Chunk], Problem, Costs, Options], Decisions] = fitted

    def __call__(self, problem: Problem, costs: Costs, options: Options) -> Decisions:
        """Plan a batch.

        Raises:
            InfeasibleError: no chunk table fits the caps.
            PlanError: the schedule needs another placement, or cannot order this batch; the message says what it needs.
        """
        placement = self.placement(problem, options)
        best: tuple[float, Decisions] | None = None
        refusals: list[InfeasibleError | PlanError] = []
        for chunks in self.tables(problem, costs, options):
            for order in self._orders(Batch(chunks, slice_groups(chunks), placement, problem, costs), refusals):
                try:
                    rows, joined = _asked_for(order, problem, options)
                    if joined:
                        decisions = fitted(rows, chunks, problem, costs, options, partial(JoinedDecisions, joined=joined))
                    else:
                        decisions = self.fit(rows, chunks, problem, costs, options)
                except (InfeasibleError, PlanError) as refusal:  # no room, or a deadlock of unequal sequences
                    refusals.append(refusal)
                    continue
                took_us = decisions.makespan_us(problem, costs)
                if best is None or took_us < best[0]:
                    best = took_us, decisions
        if best is None:
            without_room = [error for error in refusals if isinstance(error, InfeasibleError)]
            raise min(without_room, key=lambda error: error.least_cap_bytes or math.inf) if without_room else refusals[0]
        return best[1]

    @property
    def stages(self) -> str:
        """The stages of a rank, for people."""
        return f"{self.chunks_per_rank or '2 or more'}{', V' if self.kind == 'v' else ''}"

    def layout(self, num_layers: int, num_ranks: int, count: int = 2) -> Layout:
        """Return the layout of even layers at the placement of the schedule.

        Args:
            count: stages of each rank, where the schedule takes any number above one.

        Raises:
            EppError: there are more stages than layers, or the schedule divides them otherwise.
        """
        placement = Placement(self.kind, num_ranks, self.chunks_per_rank or max(2, count))
        return Layout(even_layers(num_layers, placement.num_stages), placement)

    def _orders(self, batch: Batch, refusals: list[InfeasibleError | PlanError]) -> Iterator[JoinedOrder]:
        """Yield the orders of a chunk table; append to `refusals` why there are none."""
        try:
            yield from map(as_joined, self.orders(batch))
        except PlanError as refusal:
            refusals.append(refusal)

    def placement(self, problem: Problem, options: Options) -> Placement:
        """Return the placement of a problem. Raises `PlanError` if it is another than the schedule needs."""
        count, wanted = problem.num_stages // problem.num_ranks, self.chunks_per_rank
        placement, fits = Placement(self.kind, problem.num_ranks, count), count > 1 if wanted is None else count == wanted
        if placement.rank_of == problem.placement and fits:
            return placement
        number = {None: "two or more stages", 1: "one stage"}.get(wanted, f"{wanted} stages")
        shape = " in a V" if self.kind == "v" else ""
        raise PlanError(
            f"planner {options.planner!r} needs {number} on each rank{shape}; the stages are on ranks {list(problem.placement)}"
        )


def as_joined(order: Order | JoinedOrder) -> JoinedOrder:
    """Return an order with its steps of two actions, which may be none."""
    return order if isinstance(order, JoinedOrder) else JoinedOrder(order, frozenset())


def _asked_for(order: JoinedOrder, problem: Problem, options: Options) -> JoinedOrder:
    """Leave out what the problem does not have: backwards of an evaluation, and weight gradients that are not split off."""
    ops = {action.op for row in order.rows for action in row}
    left_out = set() if options.split_weight else {Op.W}
    if problem.forward_only:
        left_out = {op for op in ops if operation(op).presence not in (Presence.ALWAYS, Presence.COMPLETE_ALWAYS)}
    rows = tuple(tuple(action for action in row if action.op not in left_out) for row in order.rows)
    return JoinedOrder(rows, adjacent(rows, order.joined))
