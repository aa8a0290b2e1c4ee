"""One solve of the exact planner: from a start to a constraint program, and from its solution back to decisions."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_epp.contrib.exact.added import rank_of, times_of
from megatron_epp.contrib.exact.choices import Choice, Clock, choices_of
from megatron_epp.contrib.exact.library_output import printing_to_stderr
from megatron_epp.contrib.exact.memory_intervals import Memory
from megatron_epp.contrib.exact.program import Choices, Program, solver
from megatron_epp.plan import Action, Chunk, Op
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.memory.offload import timed
from megatron_epp.planner.order import CopyOrder
from megatron_epp.planner.tables import Tables

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Case:
    """Input of a solve."""

    chunks: tuple[Chunk, ...]  # the chunk table
    tables: Tables  # times and sizes of the chunk table
    # problem, options: as `plan` takes them
    problem: Problem
    options: Options
    shares: tuple[float, ...]  # of kept bytes that may be copied to host memory
    horizon_us: float  # only plans that end by then are of interest
    bound_us: float  # no plan ends earlier

    @property
    def choices(self) -> Choices:
        """The choices of every stage and chunk."""
        splits, fixed = self.options.split_weight, self.options.recompute
        shares = self.shares if self.options.offload and math.isfinite(self.tables.host_us_per_byte) else ()
        choices: Choices = []
        for stage, num_layers in enumerate(self.tables.num_layers):
            choices.append([])
            for c in range(len(self.chunks)):
                most = int(self.tables.columns.most[stage * len(self.chunks) + c])
                counts = range(most + 1) if fixed == "auto" else (min(int(fixed), num_layers),)
                choices[-1].append(list(choices_of(self.tables, stage, c, splits=splits, shares=shares, recompute=counts)))
        return choices


@dataclass(frozen=True, slots=True)
class Solved:
    """Result of a solve."""

    decisions: Decisions | None  # the best found; None where none was found in time
    bound_us: float  # no decisions are faster; infinite where the program has no solution


class Progress:
    """Log of a solve: the best makespan so far, the bound, and the gap between them."""

    def __init__(self, tick_us: float, horizon_us: float, bound_us: float) -> None:
        self.tick_us, self.best_us, self.bound_us = tick_us, horizon_us, bound_us

    def better(self, ticks: float) -> None:
        """Log a better plan."""
        self.best_us = min(self.best_us, ticks * self.tick_us)
        self._say()

    def proved(self, ticks: float) -> None:
        """Log a better bound."""
        self.bound_us = max(self.bound_us, ticks * self.tick_us)
        self._say()

    def _say(self) -> None:
        gap = self.best_us / self.bound_us - 1 if self.bound_us > 0 else math.inf
        logger.info("best %.3f ms, bound %.3f ms, gap %.2f %%", self.best_us / 1e3, self.bound_us / 1e3, 100 * max(0.0, gap))


def solve(case: Case, start: Decisions | None, time_limit_s: float | None, workers: int) -> Solved:
    """Find the fastest decisions of a case.

    Args:
        start: decisions that fit the caps, for the solver to begin with; None for none.
        time_limit_s: stop after so long with the best so far; None for no limit.

    Raises:
        PlanError: OR-tools is not installed.
    """
    cp = solver()
    choices = case.choices
    clock = Clock.of(_times_us(case.tables, choices), case.horizon_us)
    horizon = clock.ticks(case.horizon_us)
    program = Program(case.chunks, case.tables, choices, clock, horizon, cp.CpModel())
    program.write(min(clock.ticks(case.bound_us), horizon))
    Memory(program, case.problem.cap_bytes, case.problem.host_cap_bytes).add()
    if start is not None:
        _hint(program, start)
    engine, progress = cp.CpSolver(), Progress(clock.tick_us, case.horizon_us, case.bound_us)
    engine.parameters.num_workers = workers
    if time_limit_s is not None:
        engine.parameters.max_time_in_seconds = time_limit_s
    engine.best_bound_callback = progress.proved
    with printing_to_stderr():
        status = engine.solve(program.model, _listener(cp, progress))
    if status == cp.MODEL_INVALID:
        raise AssertionError(program.model.validate())
    if status == cp.INFEASIBLE:
        return Solved(None, math.inf)
    decisions = _decisions(case, program, engine) if status in (cp.OPTIMAL, cp.FEASIBLE) else None
    return Solved(decisions, max(case.bound_us, engine.best_objective_bound * clock.tick_us))


def _listener(cp: Any, progress: Progress) -> Any:
    class Listener(cp.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            progress.better(self.objective_value)

    return Listener()


def _hint(program: Program, start: Decisions) -> None:
    """Have the solver begin with decisions: their choices, and the times that follow."""
    tables, model, offload = program.tables, program.model, start.as_offload
    played = play(start.order, tables, start.recompute_steps, timed(offload, tables))
    begins = {a: at for row, times in zip(start.order, played.start_us, strict=True) for a, at in zip(row, times, strict=True)}
    for row, times in zip(start.copies, played.copy_start_us, strict=False):
        begins |= {action: at for (action, _), at in zip(row, times, strict=True)}
    for action, span in program.spans.items():
        if action in begins:
            model.add_hint(span.start, program.clock.ticks(begins[action]))
    for stage, rows in enumerate(program.choices):
        for c, choices in enumerate(rows):
            moved = offload.moved(tables, stage, c) if offload.shares else 0
            like = start.recompute_steps[stage][c], Action(Op.W, stage, c) in begins, moved
            for literal, choice in zip(program.chosen[stage][c], choices, strict=True):
                model.add_hint(literal, (choice.num_steps, choice.split, choice.moved_bytes) == like)


def _decisions(case: Case, program: Program, engine: Any) -> Decisions:
    """Read the decisions of the best solution."""
    chosen: list[list[Choice]] = []
    for rows, choices in zip(program.chosen, program.choices, strict=True):
        chosen.append([own[list(map(engine.value, row)).index(1)] for row, own in zip(rows, choices, strict=True)])
    times = {
        action: (engine.value(span.start), engine.value(span.end))
        for action, span in program.spans.items()
        if span.present is True or engine.value(span.present)
    }
    ranks: list[list[Action]] = [[] for _ in range(case.problem.num_ranks)]
    copies: list[list[Action]] = [[] for _ in ranks]
    for action in sorted(times, key=times.__getitem__):
        rows_of = copies if action.op in (Op.O, Op.L) else ranks
        rows_of[rank_of(action, case.tables)].append(action)
    has_copies = any(copies)
    return Decisions(
        case.chunks,
        tuple(map(tuple, ranks)),
        [[choice.num_steps for choice in row] for row in chosen],
        copies=_issued(ranks, copies, times) if has_copies else (),
        offload=tuple(tuple(choice.share for choice in row) for row in chosen) if has_copies else (),
    )


def _issued(
    ranks: Sequence[Sequence[Action]], copies: Sequence[Sequence[Action]], times: Mapping[Action, tuple[int, int]]
) -> CopyOrder:
    """Pair every copy with the last compute action of its rank that has ended when it starts."""
    issued = []
    for actions, own in zip(ranks, copies, strict=True):
        ends = [times[action][1] for action in actions]
        issued.append(tuple((copy, actions[bisect_right(ends, times[copy][0]) - 1]) for copy in own))
    return tuple(issued)


def _times_us(tables: Tables, choices: Choices) -> set[float]:
    """All times that the program needs in ticks."""
    every = [choice for row in choices for own in row for choice in own]
    copies = {tables.host_us(choice.moved_bytes) for choice in every if choice.moved_bytes}
    columns = [*tables.hops, *(row for passes in tables.passes for row in (passes.forward_us, passes.weight_us))]
    times_us = {time_us for column in columns for time_us in column.tolist()}
    return {*times_us, *times_of(tables), *(choice.backward_us for choice in every), *copies}
