"""Plans from the candidates of a search, with room for their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.model import Costs
from megatron_epp.features import batch_target, plan_targets
from megatron_epp.plan import InfeasibleError, Plan, PlanError
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof.lockstep import check_lockstep
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.candidates import Candidate, Candidates
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.message_room import MessageRoomError, proven_cap
from megatron_epp.planner.replicas import Replicas, require_equal, split_together
from megatron_epp.planner.search import descend, search, walk_further
from megatron_epp.planner.validation import validate

ROUNDS, ROUNDS_OF_TABLES = 16, 4
"""Plans tried with ever more memory for messages, and those after which the memory is set aside for all chunk tables."""


def plan_or_refuse(problems: Sequence[Problem], costs: Costs, options: Options, names_cap: bool = True) -> tuple[Plan, ...]:
    """Plan a batch, or replicas in lockstep, by the search. Raises `InfeasibleError` if nothing fits; there is a plan under the
    cap that the error names, its messages included.
    """
    replicas = Replicas(tuple(problems), costs, options)
    candidates = search(replicas)
    try:
        return planned(candidates)
    except InfeasibleError as error:
        from megatron_epp.planner import least  # it is all about batches that do not fit

        if not replicas.is_lockstep and least.one_order_decides(problems[0], replace(options, offload=False)):
            return least.least_or_refuse(problems[0], costs, options, candidates.least_host_bytes, planned)
        if not error.least_cap_bytes or not names_cap:
            raise
        cap = proven_cap(error.least_cap_bytes, lambda tried: planned(search(replicas.with_caps(tried))))
        if cap == error.least_cap_bytes:
            raise
        raise infeasible(problems[0], costs, options, cap) from None


def plan_alone(problem: Problem, costs: Costs, options: Options, names_cap: bool = True) -> Plan:
    """Plan by the search, as `planner.plan` does."""
    validate(problem, costs, options)

    def of(asked: Problem) -> Plan:
        return plan_or_refuse((asked,), costs, options, names_cap)[0]

    choose = batch_target(problem, "choice")
    chosen: Plan = of(problem) if choose is None else choose(problem, costs, options, of)
    return chosen


def plan_lockstep(problems: Sequence[Problem], costs: Costs, options: Options) -> tuple[Plan, ...]:
    """Plan one iteration of replicas that share experts. Equal arguments give equal plans, in every process.

    Problems are equal but for their lengths, and the planner must be "greedy". Each plan is sound by itself, `check_lockstep`
    finds nothing wrong with them, and the time of an action is the slowest replica's.

    Raises `InfeasibleError` if nothing fits the caps, or one replica has too few tokens for the chunks that another needs, and
    `PlanError` if the arguments make no sense, or (a bug) the plans do not pass the checks.
    """
    require_equal(problems, costs, options)
    return plan_or_refuse(problems, costs, options)


def finished(candidates: Candidates) -> Candidate:
    """Return the fastest candidate, or one that a feature makes of the fastest, if they run alone."""
    best = candidates.fitting()[0]
    if not candidates.replicas.is_lockstep:
        for finish in plan_targets(candidates.problem, candidates.options, "finish"):
            best = finish(candidates, best)
    return best


def written(candidates: Candidates, best: Candidate) -> tuple[Plan, ...]:
    """Write a candidate's plans, one for each replica. Raises `MessageRoomError` if they fit but for their messages, and
    `PlanError` if one fails `check`, or replicas' do not match (a bug).
    """
    replicas, decisions = candidates.replicas.with_room(candidates.room_of(best)), best.decisions
    costs, options = replicas.costs, replicas.options
    if not replicas.is_lockstep:
        return (build_plan(replicas.problems[0], costs, options, decisions[0]),)
    tables = candidates.tables_and_bound(best.table, best.recipe)[0]
    if any(pairs := tuple(own.kv_offload for own in decisions)):
        sharing = decisions[0].kv_sharing if any(any(own.copies) for own in decisions) else 1.0
        tables = replicas.kv_offload(tables, best.table, pairs, sharing)
    every = zip(replicas.problems, split_together(decisions, tables, replicas), tables, strict=True)
    plans = tuple(build_plan(problem, costs, options, own, sizes) for problem, own, sizes in every)
    if faults := check_lockstep(plans):
        raise PlanError("plans of replicas that share experts do not match: " + "; ".join(map(str, faults[:3])))
    return plans


def planned(candidates: Candidates) -> tuple[Plan, ...]:
    """Write the plans of the fastest candidate whose messages have room. Raises `InfeasibleError` if none fits."""
    for number in range(ROUNDS):
        if not candidates.fitting():
            break
        best = finished(candidates)
        try:
            return written(candidates, best)
        except MessageRoomError as error:
            # Where plans of several tables lack room, those of the others do, too, and each would take a round.
            best = descend(candidates, candidates.set_room(best, error.needed, of_all=number >= ROUNDS_OF_TABLES))
            if not best.fits:  # the search did not walk on, since others fitted then
                walk_further(candidates, best, best)
    costs, options = candidates.replicas.costs, candidates.options
    raise infeasible(candidates.problem, costs, options, candidates.least_cap_bytes, candidates.least_host_bytes)


def greedy(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The default planner's decisions, as other planners begin with them. Raises `InfeasibleError` if nothing fits the caps."""
    return decisions_of(search(Replicas((problem,), costs, options)))


def decisions_of(candidates: Candidates) -> Decisions:
    if not candidates.fitting():
        planned(candidates)  # raises
    return finished(candidates).decisions[0]
