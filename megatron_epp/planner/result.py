"""Plans from the candidates of a search: local search, messages, and the refusal of what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pkgutil import resolve_name

from megatron_epp.cost.model import Costs
from megatron_epp.features import plan_targets
from megatron_epp.plan import Chunk, InfeasibleError, Plan, PlanError
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof.lockstep import check_lockstep
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.candidates import Candidate, Candidates
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.least import may_fit, one_order_decides, proven
from megatron_epp.planner.local_search import improve, searches
from megatron_epp.planner.message_room import MessageRoomError, proven_cap
from megatron_epp.planner.replicas import Replicas, require_equal, split_together
from megatron_epp.planner.search import descend, search
from megatron_epp.planner.settings import first_recipe
from megatron_epp.planner.validation import validate

IMPROVED_TABLES = 3
"""Chunk tables, the fastest, from whose plans local search starts."""
FINISHED_CANDIDATES = 8
"""Candidates, the fastest, that a finisher (`finisher_of`) tries to improve."""
ROUNDS, ROUNDS_OF_TABLES = 16, 4
"""Plans tried with ever more memory for messages, and those after which the memory is set aside for all chunk tables."""


def plan_or_refuse(problems: Sequence[Problem], costs: Costs, options: Options, names_cap: bool = True) -> tuple[Plan, ...]:
    """Plan a batch, or replicas in lockstep, by the search. Raises `InfeasibleError` if nothing fits; there is a plan under the
    cap that the error names, its messages included.
    """
    replicas = Replicas(tuple(problems), costs, options)
    one_decides = not replicas.is_lockstep and one_order_decides(problems[0], replace(options, offload=False))
    if one_decides and not may_fit(problems[0], costs, options):
        return _least_or_refuse(problems[0], costs, options, 0)
    candidates = search(replicas)
    try:
        return planned(candidates)
    except InfeasibleError as error:
        if one_decides:
            return _least_or_refuse(problems[0], costs, options, candidates.least_host_bytes)
        if not error.least_cap_bytes or not names_cap:
            raise
        cap = proven_cap(error.least_cap_bytes, lambda tried: planned(search(replicas.with_caps(tried))))
        if cap == error.least_cap_bytes:
            raise
        raise infeasible(problems[0], costs, options, cap) from None


def plan_alone(problem: Problem, costs: Costs, options: Options, names_cap: bool = True) -> Plan:
    """Plan by the search, as `planner.plan` does."""
    validate(problem, costs, options)
    return plan_or_refuse((problem,), costs, options, names_cap)[0]


def plan_lockstep(problems: Sequence[Problem], costs: Costs, options: Options) -> tuple[Plan, ...]:
    """Plan one iteration of replicas that share experts. Equal arguments give equal plans, in every process.

    Problems are equal but for their lengths, and the planner must be "greedy". Each plan is sound by itself, `check_lockstep`
    finds nothing wrong with them, and the time of an action is the slowest replica's.

    Raises `InfeasibleError` if nothing fits the caps, or one replica has too few tokens for the chunks that another needs, and
    `PlanError` if the arguments make no sense, or (a bug) the plans do not pass the checks.
    """
    require_equal(problems, costs, options)
    return plan_or_refuse(problems, costs, options)


def _least_or_refuse(problem: Problem, costs: Costs, options: Options, least_host: int) -> tuple[Plan, ...]:
    try:
        proof = proven(problem, costs, replace(options, offload=False))
    except InfeasibleError as plain:
        if not options.offload:
            raise
        refused = infeasible(problem, costs, options, plain.least_cap_bytes, least_host)
        raise refused.with_context(after=" That would do without offload; with it less may do.") from None
    with suppress(InfeasibleError):  # in a faster order
        return planned(every_order(Replicas((proof.problem,), costs, options), proof.decisions.chunks))
    return (build_plan(proof.problem, costs, options, proof.decisions),)


def finisher_of(options: Options) -> Callable[[Sequence[Decisions], Problem, Costs, Options], Decisions] | None:
    """Return the function of another package that a setting asks for; None if none does. It returns the fastest of some
    decisions, the fastest first, and of what it makes of them.
    """
    return resolve_name("megatron_epp.contrib.overlap.pairing:overlapped") if options.overlap_exchanges else None


def finished(candidates: Candidates) -> Candidate:
    """Improve the fastest candidates of small plans by local search, and by what the settings ask for; return the fastest."""
    fitting, problem, options = candidates.fitting(), candidates.problem, candidates.options
    best = fitting[0]
    if candidates.replicas.is_lockstep:
        return best
    tables = list({id(candidate.table): candidate.table for candidate in fitting}.values())[:IMPROVED_TABLES]
    for table in tables:
        # Local search knows no copies, so the fastest without may overtake a faster one that has some.
        of_table = (candidate for candidate in fitting if candidate.table is table and not candidate.has_copies)
        candidate = next(of_table, None)
        if candidate is not None and searches(options, problem.num_stages * len(table)):
            best = min(best, improved(candidates, candidate), key=attrgetter("key"))
    if (finisher := finisher_of(options)) is None:
        return best
    # A finisher makes its own tables: without the room that messages needed before, its plan would lack it again.
    problem = candidates.replicas.with_room(candidates.room_of(best)).problems[0]
    fastest = [best, *(candidate for candidate in fitting[:FINISHED_CANDIDATES] if candidate is not best)]
    decisions = [candidate.decisions[0] for candidate in fastest]
    return replace(best, decisions=(finisher(decisions, problem, candidates.replicas.costs, options),))


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


def improved(candidates: Candidates, candidate: Candidate) -> Candidate:
    """Improve a candidate of one replica, without copies, by local search."""
    whole, (tables,) = candidate.whole_backwards[0], candidates.tables_and_bound(candidate.table, candidate.recipe)[0]
    moved = improve(whole, tables, candidates.problem, candidates.options, split_weight=candidates.splits)
    return completed(candidates, candidate, moved)


def completed(candidates: Candidates, candidate: Candidate, whole: Decisions) -> Candidate:
    """Return a candidate of one replica with other whole backwards, without copies, and with all that is added to these."""
    tables = candidates.tables_and_bound(candidate.table, candidate.recipe)[0]
    took_us = makespan_us(whole.order, tables[0], whole.recompute_steps)
    return candidates.complete(candidate, (whole,), tables, took_us, [whole.as_offload], candidates.splits)


def planned(candidates: Candidates) -> tuple[Plan, ...]:
    """Write the plans of the fastest candidate whose messages have room. Raises `InfeasibleError` if none fits, with the
    smallest cap under which one would, but for its messages.
    """
    for number in range(ROUNDS):
        if not candidates.fitting():
            break
        best = finished(candidates)
        try:
            return written(candidates, best)
        except MessageRoomError as error:
            # Where plans of several tables lack room, those of the others do, too, and each would take a round.
            descend(candidates, candidates.set_room(best, error.needed, of_all=number >= ROUNDS_OF_TABLES))
    costs, options = candidates.replicas.costs, candidates.options
    raise infeasible(candidates.problem, costs, options, candidates.least_cap_bytes, candidates.least_host_bytes)


def every_order(replicas: Replicas, chunks: tuple[Chunk, ...]) -> Candidates:
    """Try all orders of a chunk table of one replica, and copies with the fastest of them."""
    free = Candidates(replicas.without_caps, chunks=chunks)
    candidates, first, values = (
        Candidates(replicas, free),
        first_recipe(free.problem, free.orders, free.values["cut"][0]),
        free.values,
    )
    for reach, lead in product(values["reach"], values["lead"]):
        free.of(first._replace(reach=reach, lead=lead))
        candidates.of(first._replace(reach=reach, lead=lead))
    for walk_on in plan_targets(candidates.problem, candidates.options, "search"):
        walk_on(candidates, candidates.best(), free.best())
    return candidates


def greedy(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The default planner's decisions, as other planners begin with them. Raises `InfeasibleError` if nothing fits the caps."""
    return decisions_of(search(Replicas((problem,), costs, options)))


def decisions_of(candidates: Candidates) -> Decisions:
    if not candidates.fitting():
        planned(candidates)  # raises
    return finished(candidates).decisions[0]
