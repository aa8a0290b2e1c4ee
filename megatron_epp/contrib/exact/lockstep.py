"""Refinement of replicas that share experts, which run one order in lockstep, each with chunks of its own.

The solver plans one replica, the one that holds most, with the times of the slowest and the slices of all in order. No plans of
the replicas together are faster than its bound; what it finds is tried on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from megatron_epp.contrib.exact.oracle import oracle
from megatron_epp.contrib.exact.queue import SolverQueue
from megatron_epp.contrib.exact.refine import REFINER_LIMIT_S, Refined, tell_gap, why_greedy
from megatron_epp.cost import Costs
from megatron_epp.plan import Plan, PlanError
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.kernels.codes import encode_known
from megatron_epp.planner.memory.messages import MessageRoomError, planned_with_room
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.search.lockstep import found, require_equal, with_room_of, written
from megatron_epp.planner.search.recent import Recent, canonical, relabelled
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.search.trials import Candidate

Batch = tuple[Problem, ...]
"""A problem for each replica."""
Answer = Refined[tuple[Decisions, ...]] | None
"""Decisions for each replica; None where the greedy ones have no room for their messages, and are made anew with more."""


class LockstepRefiner:
    """Plans the batches of replicas in lockstep at once, and refines them for the next time that their lengths come.

    Args:
        costs: time and memory of every stage.
        options: the user's settings.
    """

    def __init__(self, costs: Costs, options: Options) -> None:
        self.costs, self.options = costs, options
        self.solved = Recent[Batch, tuple[Decisions, ...]]()
        self.queue = SolverQueue[Batch](_refining, costs, options)

    def plan(self, problems: Batch) -> tuple[Plan, ...]:
        """The refined plans where there are some, else the greedy plans. Raises what `plan_lockstep` raises."""
        require_equal(problems, self.costs, self.options)
        for asked, answer in self.queue.answers():
            if answer is not None:
                tell_gap(sum(len(one.lengths) for one in asked), answer)
            self.solved.remember(asked, () if answer is None else answer.decisions)
        return planned_with_room(problems[0], lambda room: self._plans(with_room_of(room, problems)))

    def _plans(self, problems: Batch) -> tuple[Plan, ...]:
        replicas = Replicas(problems, self.costs, self.options)
        asked, sequences = zip(*map(canonical, problems), strict=True)
        made = self.solved.recall(asked)
        if not made:
            best = found(replicas)
            plans = written(replicas, best.made, best.tables)
            if why := why_stays(best, problems):
                self.queue.tell_once(why)
            elif made is None:
                self.queue.ask(asked)
            return plans
        own = [relabelled(*each) for each in zip(made, sequences, strict=True)]
        return written(replicas, own, replicas.tables(Aligned(tuple(one.chunks for one in own))))

    def close(self) -> None:
        """End the solver's process."""
        self.queue.close()


def why_stays(best: Candidate, problems: Batch) -> str:
    """Return why greedy decisions for replicas in lockstep stay as they are; empty where the solver may find better ones."""
    if any(one.copies or one.kv_offload for one in best.made):
        return "it offloads nothing where replicas share experts"
    return why_greedy(best.made[0], problems[0])


def _refining(costs: Costs, options: Options) -> Callable[[Batch], Answer]:
    return partial(refined_together, costs=costs, options=options)


def refined_together(problems: Batch, costs: Costs, options: Options) -> Answer:
    """Look for better decisions for replicas in lockstep than the greedy ones.

    Args:
        problems: of the replicas.
        costs, options: as for `plan_lockstep`.
    """
    replicas = Replicas(problems, costs, options)
    best = found(replicas)
    try:
        start_us = written(replicas, best.made, best.tables)[0].predicted.makespan_us
    except MessageRoomError:
        return None
    at = max(range(len(problems)), key=lambda replica: sum(map(sum, best.tables[replica].activation)))
    limit_s = REFINER_LIMIT_S if options.plan_limit_s is None else options.plan_limit_s
    proven = oracle(
        best.made[at].chunks,
        problems[at],
        costs,
        replace(options, offload=False),
        start=best.made[at],
        time_limit_s=limit_s,
        tables=best.tables[at],
        others=[one.chunks for one in best.made],
    )
    made, made_us = best.made, start_us
    for tried in () if proven.decisions is None else _for_all(proven.decisions, best, replicas):
        try:
            tried_us = written(replicas, tried, best.tables)[0].predicted.makespan_us
        except PlanError:  # above the cap of another replica
            continue
        if tried_us < made_us:
            made, made_us = tried, tried_us
    # Plans with copies, which the solver leaves out here, may be below its bound.
    return Refined(made, start_us, made_us, 0.0 if replicas.can_offload else min(proven.bound_us, made_us))


def _for_all(one: Decisions, best: Candidate, replicas: Replicas) -> Iterator[tuple[Decisions, ...]]:
    """Yield decisions of all replicas in the order of one: with its recompute, and with what all of them need.

    Args:
        one: decisions of a replica.
        best: what the search found for all.
        replicas: their problems.
    """
    fit = replicas.fit(encode_known(one.order, len(one.chunks)), best.tables)
    for steps in filter(None, (one.recompute_steps, fit.recompute_steps)):
        yield tuple(replace(own, order=one.order, recompute_steps=steps) for own in best.made)
