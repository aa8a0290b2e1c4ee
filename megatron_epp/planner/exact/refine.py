"""Refinement in OptPipe's manner (arXiv 2510.05186, see the package): run the greedy plan, and a better one when there is one.

What a solver finds in a given time depends on the machine, so use it where one process decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.exact.oracle import makespan_us, oracle
from megatron_epp.planner.memory.messages import MessageRoomError, planned_with_room
from megatron_epp.planner.memory.recompute import fit_recompute
from megatron_epp.planner.orders.vocabulary import has_shards
from megatron_epp.planner.orders.warm_up import slice_groups
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.greedy import greedy
from megatron_epp.planner.search.recent import Recent, canonical, relabelled
from megatron_epp.planner.service.worker import Worker

Shape = tuple[bool, tuple[int, ...], tuple[int, ...]]
"""Batches of equal shapes can run in one order: see `shape_of`."""

TIME_LIMIT_S = 10.0
MOST_CHUNKS = 16
"""Longer chunk tables keep the greedy decisions: their programs do not get anywhere in minutes."""
WAITING = 4
"""Batches that may wait for the solver; while that many do, others are not refined."""
NICENESS = 10
"""Niceness of the solver's process: training has priority."""


def milp(problem: Problem, costs: Costs, options: Options, time_limit_s: float = TIME_LIMIT_S) -> Decisions:
    """Improve the greedy decisions by the oracle, within a given time: order, recompute, weight gradients and copies.

    Evaluations, plans with vocabulary shards and tables of more than `MOST_CHUNKS` chunks stay as they are.

    Args:
        problem, costs, options: as `planner.plan` takes them.
        time_limit_s: seconds for the oracle.

    Raises:
        InfeasibleError: the greedy planner finds nothing that fits the caps.
        MessageRoomError: its decisions fit but for their messages.
        PlanError: OR-tools is not installed.
    """
    options = replace(options, overlap_exchanges=False)  # the program knows no steps of two actions
    start = greedy(problem, costs, options)
    if problem.forward_only or len(start.chunks) > MOST_CHUNKS or has_shards(start.tables(problem, costs)):
        return start
    build_plan(problem, costs, options, start)  # raises where messages do not fit: `plan` then asks again, with room for them
    found = oracle(start.chunks, problem, costs, options, start=start, time_limit_s=time_limit_s)
    return found.decisions or start


class Refiner:
    """Plans a batch at once and refines it in a process of its own, for the next batch of equal lengths in any order.

    A batch of other lengths whose chunk table has the same shape tries the refined order on its own chunks.
    """

    def __init__(self, costs: Costs, options: Options, *, time_limit_s: float = 60.0) -> None:
        """Start the process that refines.

        Args:
            costs: time and memory of every stage.
            options: the user's settings.
            time_limit_s: seconds for each batch.
        """
        self.costs, self.options = costs, replace(options, overlap_exchanges=False)
        self.solved = Recent[Problem, Decisions]()
        self.by_shape = Recent[Shape, Decisions]()
        self._asked: deque[Problem] = deque()  # of the worker, oldest first
        self._worker = Worker(_refining, costs, self.options, time_limit_s, niceness=NICENESS)

    def plan(self, problem: Problem) -> Plan:
        """The refined plan where there is one, else the greedy plan, without waiting for the solver.

        Raises what `planner.plan` raises, and what went wrong when an earlier batch was refined.
        """
        validate(problem, self.costs, self.options)
        while self._asked and self._worker.is_ready():
            asked, made = self._asked.popleft(), self._worker.receive()
            self.solved.remember(asked, made)
            self.by_shape.remember(shape_of(asked, made), made)
        return planned_with_room(problem, self._plan)

    def _plan(self, problem: Problem) -> Plan:
        asked, sequences = canonical(problem)
        made = self.solved.recall(asked)
        if made is None:
            made = greedy(asked, self.costs, self.options)
            if asked not in self._asked and len(self._asked) < WAITING:
                self._worker.send(asked)
                self._asked.append(asked)
            like = self.by_shape.recall(shape_of(asked, made))
            made = made if like is None else faster(made, like, asked, self.costs, self.options)
        return build_plan(problem, self.costs, self.options, relabelled(made, sequences))

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


def _refining(costs: Costs, options: Options, time_limit_s: float) -> Callable[[Problem], Decisions]:
    return partial(_refined, costs=costs, options=options, time_limit_s=time_limit_s)


def _refined(problem: Problem, costs: Costs, options: Options, time_limit_s: float) -> Decisions:
    """Return what `milp` finds; where its start has no room for messages, that start, which is then planned anew with more."""
    try:
        return milp(problem, costs, options, time_limit_s)
    except MessageRoomError:
        return greedy(problem, costs, options)
