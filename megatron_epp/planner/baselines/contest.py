"""Comparison of a baseline's candidates: the fastest under the memory caps, judged by the rules for every planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, PlanError, Remedy
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.memory.recompute import peaks_bytes
from megatron_epp.planner.problem import Options, Problem, require_one_stage_per_rank
from megatron_epp.planner.search.trials import infeasible
from megatron_epp.planner.tables import Tables
from megatron_epp.planner.tabulate import tabulate


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
        """Judge a candidate: True if it fits the caps, whether or not it is the fastest. Otherwise its peak is recorded."""
        peaks = peaks_bytes(made.order, tables, made.recompute_steps)
        if any(peak > cap for peak, cap in zip(peaks, self.problem.cap_bytes, strict=True)):
            self.would_do(max(peaks))
            return False
        took_us = makespan_us(made.order, tables, made.recompute_steps)
        if took_us < self.best_us:
            self.best, self.best_us = made, took_us
        return True

    def would_do(self, cap: int) -> None:
        """Record a cap, in bytes per rank, under which some candidate fits."""
        self.needed_bytes = min(cap, self.needed_bytes or cap)

    def result(self) -> Decisions:
        """The fastest candidate. Raises `InfeasibleError` with a cap that would have let one through."""
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, self.needed_bytes, planner=self.options.planner)


def own_recompute_only(options: Options) -> None:
    """Raise `PlanError` if the user fixed the recompute that a planner chooses itself."""
    if options.recompute != "auto":
        raise PlanError(
            f"planner {options.planner!r} chooses recompute itself; it cannot take {options.recompute} layers",
            Remedy("set", "recompute", "auto"),
        )
