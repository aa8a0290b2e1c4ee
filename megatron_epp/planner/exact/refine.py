"""Refinement in OptPipe's manner (arXiv 2510.05186, see the package): run the greedy plan, and a better one when there is one.

What a solver finds in a given time depends on the machine, so use it where one process decides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.exact.oracle import makespan_us, oracle
from megatron_epp.planner.memory.messages import MessageRoomError, planned_with_room
from megatron_epp.planner.memory.recompute import fit_recompute
from megatron_epp.planner.orders.warm_up import slice_groups
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.greedy import greedy
from megatron_epp.planner.search.overlapped import overlapped
from megatron_epp.planner.search.recent import Recent, canonical, relabelled
from megatron_epp.planner.service.worker import Worker

logger = logging.getLogger(__name__)

Shape = tuple[bool, tuple[int, ...], tuple[int, ...]]
"""Batches of equal shapes can run in one order: see `shape_of`."""

TIME_LIMIT_S, REFINER_LIMIT_S = 10.0, 60.0
"""Seconds for a batch that is waited for, and for one that is refined in the background."""
MOST_CHUNKS = 16
"""Longer chunk tables keep the greedy decisions: their programs do not get anywhere in minutes."""
WAITING = 4
"""Batches that may wait for the solver; while that many do, others are not refined."""
NICENESS = 10
"""Niceness of the solver's process: training has priority."""


@dataclass(frozen=True, slots=True)
class Refined:
    """Decisions of a batch after the oracle.

    Attributes:
        decisions: the best found.
        start_us, makespan_us: makespan before and after.
        bound_us: no decisions of the oracle's kind are faster; 0 where that is not known, since exchanges are overlapped.
    """

    decisions: Decisions
    start_us: float
    makespan_us: float
    bound_us: float


def milp(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Improve the greedy decisions by the oracle, within a given time: order, recompute, weight gradients and copies.

    What `why_greedy` names stays as greedy plans it, and a log line says so.

    Args:
        problem, costs, options: as `planner.plan` takes them.

    Raises:
        InfeasibleError: the greedy planner finds nothing that fits the caps.
        MessageRoomError: its decisions fit but for their messages.
        PlanError: OR-tools is not installed.
    """
    start = greedy(problem, costs, options)
    if why := why_greedy(start, problem):
        tell_greedy(why)
        return start
    return _refined(start, problem, costs, options, TIME_LIMIT_S).decisions


def why_greedy(made: Decisions, problem: Problem) -> str:
    """Return why greedy decisions stay as they are; empty where the oracle can look for better ones.

    Args:
        made: by the greedy planner.
        problem: as for `milp`.
    """
    if problem.forward_only:
        return "it does not know evaluations"
    if len(made.chunks) > MOST_CHUNKS:
        return f"the plan has more than {MOST_CHUNKS} chunks, too many to get anywhere in minutes"
    return ""


def tell_greedy(why: str) -> None:
    """Log that the greedy plan stays, and why."""
    logger.info("the plan is greedy's, the exact planner looks for no better one: %s", why)


class Refiner:
    """Plans a batch at once and refines it in a process of its own, for the next batch of equal lengths in any order.

    A batch of other lengths whose chunk table has the same shape tries the refined order on its own chunks.
    """

    def __init__(self, costs: Costs, options: Options) -> None:
        """Start the process that refines.

        Args:
            costs: time and memory of every stage.
            options: the user's settings.
        """
        self.costs, self.options = costs, options
        self.solved = Recent[Problem, Decisions]()
        self.by_shape = Recent[Shape, Decisions]()
        self._asked: deque[Problem] = deque()  # of the worker, oldest first
        self._told = set[str]()
        self._worker = Worker(_refining, costs, options, niceness=NICENESS)

    def plan(self, problem: Problem) -> Plan:
        """The refined plan where there is one, else the greedy plan, without waiting for the solver.

        Raises what `planner.plan` raises, and what went wrong when an earlier batch was refined.
        """
        validate(problem, self.costs, self.options)
        while self._asked and self._worker.is_ready():
            asked, found = self._asked.popleft(), self._worker.receive()
            if isinstance(found, Refined):
                _tell_gap(asked, found)
                found = found.decisions
            self.solved.remember(asked, found)
            self.by_shape.remember(shape_of(asked, found), found)
        return planned_with_room(problem, self._plan)

    def _plan(self, problem: Problem) -> Plan:
        asked, sequences = canonical(problem)
        made = self.solved.recall(asked)
        if made is None:
            made = greedy(asked, self.costs, self.options)
            if why := why_greedy(made, asked):
                self._tell_once(why)
            else:
                made = self._like_before(made, asked)
        return build_plan(problem, self.costs, self.options, relabelled(made, sequences))

    def _like_before(self, made: Decisions, asked: Problem) -> Decisions:
        """Have greedy decisions refined, and return them or, where that is faster, the order of a batch of like shape."""
        if asked not in self._asked and len(self._asked) < WAITING:
            self._worker.send(asked)
            self._asked.append(asked)
        like = self.by_shape.recall(shape_of(asked, made))
        return made if like is None else faster(made, like, asked, self.costs, self.options)

    def _tell_once(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            tell_greedy(why)

    def close(self) -> None:
        """End the process, and with it what is being solved."""
        self._worker.close()


def shape_of(problem: Problem, made: Decisions) -> Shape:
    """Return the placement of a problem, and the numbers of slices that stand together in the chunk table of its decisions."""
    return problem.forward_only, problem.placement, tuple(map(len, slice_groups(made.chunks)))


def faster(made: Decisions, like: Decisions, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Return decisions, or the same chunks in the order and with the copies of others, if that is a faster plan.

    Args:
        made: decisions of the problem.
        like: decisions of another problem, with a chunk table of the same shape.
        problem, costs, options: as for `milp`.
    """
    tried = replace(like, chunks=made.chunks, kv_offload=made.kv_offload, token_multiple=made.token_multiple)
    if not like.copies and not problem.forward_only:
        fit = fit_recompute(like.order, tried.tables(problem, costs), problem.cap_bytes, options)
        if fit.recompute_steps is None:
            return made
        tried = replace(tried, recompute_steps=fit.recompute_steps)
    return tried if makespan_us(problem, costs, options, tried) < makespan_us(problem, costs, options, made) else made


def _tell_gap(problem: Problem, found: Refined) -> None:
    logger.info(
        "refined a batch of %d sequences: %.3f ms, %.2f %% less than greedy's, %s",
        len(problem.lengths),
        found.makespan_us / 1e3,
        100 * (1 - found.makespan_us / found.start_us),
        f"gap {100 * (found.makespan_us / found.bound_us - 1):.2f} %"
        if found.bound_us
        else "no bound with overlapped exchanges",
    )


def _refining(costs: Costs, options: Options) -> Callable[[Problem], Refined | Decisions]:
    return partial(_refined_or_greedy, costs=costs, options=options)


def _refined_or_greedy(problem: Problem, costs: Costs, options: Options) -> Refined | Decisions:
    """Refine a batch; where its greedy plan has no room for messages, return that, which is then planned anew with more."""
    start = greedy(problem, costs, options)
    try:
        return _refined(start, problem, costs, options, REFINER_LIMIT_S)
    except MessageRoomError:
        return start


def _refined(start: Decisions, problem: Problem, costs: Costs, options: Options, default_s: float) -> Refined:
    """Look for better decisions than the greedy ones, by default for so many seconds.

    The oracle knows no steps of two actions: where exchanges are overlapped, neighbours in its order are joined afterwards.
    """
    # This raises where messages do not fit: `plan` then asks again, with room for them.
    start_us = build_plan(problem, costs, options, start).predicted.makespan_us
    limit_s = default_s if options.plan_limit_s is None else options.plan_limit_s
    single = greedy(problem, costs, replace(options, overlap_exchanges=False)) if start.joined else start
    found = oracle(single.chunks, problem, costs, options, start=single, time_limit_s=limit_s)
    if not options.overlap_exchanges:
        return Refined(found.decisions or start, start_us, min(found.makespan_us, start_us), found.bound_us)
    joined = overlapped([start, found.decisions or single], problem, costs, options)
    return Refined(joined, start_us, makespan_us(problem, costs, options, joined), 0.0)
