"""Refinement during training: a batch runs its greedy plan, and a better one when its lengths come again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_epp.contrib.exact.oracle import makespan_us
from megatron_epp.contrib.exact.queue import SolverQueue
from megatron_epp.contrib.exact.refine import REFINER_LIMIT_S, Refined, refined, tell_gap, why_greedy
from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.memory.messages import MessageRoomError, planned_with_room
from megatron_epp.planner.memory.recompute import fit_recompute
from megatron_epp.planner.orders.warm_up import slice_groups
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.greedy import greedy
from megatron_epp.planner.search.recent import Recent, canonical, relabelled

Shape = tuple[bool, tuple[int, ...], tuple[int, ...]]
"""Batches of equal shapes can run in one order: see `shape_of`."""


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
        self.queue = SolverQueue[Problem](_refining, costs, options)

    def plan(self, problem: Problem) -> Plan:
        """The refined plan where there is one, else the greedy plan, without waiting for the solver.

        Raises what `planner.plan` raises, and what went wrong when an earlier batch was refined.
        """
        validate(problem, self.costs, self.options)
        for asked, answer in self.queue.answers():
            if isinstance(answer, Refined):
                tell_gap(len(asked.lengths), answer)
            found = answer.decisions if isinstance(answer, Refined) else answer
            self.solved.remember(asked, found)
            self.by_shape.remember(shape_of(asked, found), found)
        return planned_with_room(problem, self._plan)

    def _plan(self, problem: Problem) -> Plan:
        asked, sequences = canonical(problem)
        made = self.solved.recall(asked)
        if made is not None:
            return build_plan(problem, self.costs, self.options, relabelled(made, sequences))
        made = greedy(asked, self.costs, self.options)
        why, like = why_greedy(made, asked), self.by_shape.recall(shape_of(asked, made))
        if like is not None and not why:
            made = faster(made, like, asked, self.costs, self.options)
        plan = build_plan(problem, self.costs, self.options, relabelled(made, sequences))
        if why:
            self.queue.tell_once(why)
        else:  # what cannot be built takes no time of the solver
            self.queue.ask(asked)
        return plan

    def close(self) -> None:
        """End the solver's process."""
        self.queue.close()


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


def _refining(costs: Costs, options: Options) -> Callable[[Problem], Refined[Decisions] | Decisions]:
    return partial(_refined_or_greedy, costs=costs, options=options)


def _refined_or_greedy(problem: Problem, costs: Costs, options: Options) -> Refined[Decisions] | Decisions:
    """Refine a batch; where its greedy plan has no room for messages, return that, which is then planned anew with more."""
    start = greedy(problem, costs, options)
    try:
        return refined(start, problem, costs, options, REFINER_LIMIT_S)
    except MessageRoomError:
        return start
