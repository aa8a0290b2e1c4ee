"""Comparison of a baseline's candidates: the fastest under the memory caps, judged by the rules for every planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, PlanError, Remedy
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.memory.recompute import peaks_bytes
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.problem import Options, Problem, require_one_stage_per_rank
from megatron_epp.planner.search.trials import infeasible
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.tabulate import tabulate

MOST_CHUNKS = 1024
"""No baseline tries a chunk table that is longer."""


class Contest:
    """Candidates for one batch: the fastest that fits so far, and where none fits the smallest cap that would suffice."""

    def __init__(self, problem: Problem, costs: Costs, options: Options) -> None:
        """Raise `PlanError` if the placement is not one stage per rank in order, the only one that the baselines support."""
        require_one_stage_per_rank(problem, options)
        self.problem, self.costs, self.options = problem, costs, options
        self.best: Decisions | None = None
        self.best_us = math.inf
        self.needed_bytes = 0

    def tables(self, chunks: Sequence[Chunk]) -> Tables:
        return tabulate(chunks, self.problem, self.costs)

    def enter(self, made: Decisions, tables: Tables) -> bool:
        """Judge a candidate. True if it fits the caps, whether or not it is the fastest."""
        if not self.fits(made.order, tables, made.recompute_steps):
            return False
        took_us = makespan_us(made.order, tables, made.recompute_steps)
        if took_us < self.best_us:
            self.best, self.best_us = made, took_us
        return True

    def fits(self, order: Order, tables: Tables, recompute_steps: RecomputeSteps) -> bool:
        """Return True if every rank stays under its cap; otherwise record the largest peak for the error message.

        Args:
            order: the actions of every rank.
            tables: times and sizes of the chunks.
            recompute_steps: recomputed layers ``[stage][chunk]``.
        """
        peaks = peaks_bytes(order, tables, recompute_steps)
        if all(peak <= cap for peak, cap in zip(peaks, self.problem.cap_bytes, strict=True)):
            return True
        self.would_do(max(peaks))
        return False

    def would_do(self, cap: int) -> None:
        """Record a cap, in bytes per rank, under which some candidate fits."""
        self.needed_bytes = min(cap, self.needed_bytes or cap)

    def enter_uniform(self, chunks: tuple[Chunk, ...], order: Order, token_multiple: int | None = None) -> bool:
        """Judge a table with the same number of recomputed layers everywhere: the smallest that fits, or the one asked for.

        Args:
            chunks: the chunk table.
            order: the actions of every rank.
            token_multiple: chunks are padded to a multiple of this; None for the problem's own.

        Returns:
            True if some number of layers fits the caps.
        """
        problem = self.problem if token_multiple is None else replace(self.problem, token_multiple=token_multiple)
        tables = tabulate(chunks, problem, self.costs)
        fixed = 0 if problem.forward_only else self.options.recompute
        counts = range(max(tables.num_layers) + 1) if fixed == "auto" else (fixed,)
        for count in counts:
            recompute_steps = uniform_layers(tables, count)
            if self.enter(Decisions(chunks, order, recompute_steps, token_multiple=token_multiple), tables):
                return True
        return False

    def result(self) -> Decisions:
        """The fastest candidate. Raises `InfeasibleError` with a cap that would have let one through."""
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, self.needed_bytes, planner=self.options.planner)


def uniform_layers(tables: Tables, count: int) -> RecomputeSteps:
    """Return the same number of recomputed layers for every chunk, or all layers where a stage has fewer."""
    return [[min(count, most)] * len(tables.message_us) for most in tables.num_layers]


def own_recompute_only(options: Options) -> None:
    """Raise `PlanError` if the user fixed the recompute that a planner chooses itself."""
    if options.recompute != "auto":
        raise PlanError(
            f"planner {options.planner!r} chooses recompute itself; it cannot take {options.recompute} layers",
            Remedy("set", "recompute", "auto"),
        )
