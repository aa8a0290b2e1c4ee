"""Plans for replicas that share experts: made together, so that all run the same actions in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from megatron_epp.cost import Costs
from megatron_epp.plan import InfeasibleError, Plan, PlanError, Remedy
from megatron_epp.plan.check.lockstep import check_lockstep
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import is_within
from megatron_epp.planner.kernels.codes import coded
from megatron_epp.planner.messages import planned_with_room
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.split_weight import peaks, with_split_weights
from megatron_epp.planner.problem import FULL_ONLY, Options, Problem, validate
from megatron_epp.planner.search.phases import search
from megatron_epp.planner.search.replicas import Replicas
from megatron_epp.planner.search.trials import Candidate, Trials
from megatron_epp.planner.tables import Tables


def plan_lockstep(problems: Sequence[Problem], costs: Costs, options: Options) -> tuple[Plan, ...]:
    """Plan one iteration of replicas that share experts. Equal arguments give equal plans, in every process.

    Args:
        problems: one for each replica, equal but for their lengths.
        costs: of every replica's pipeline.
        options: the settings of the user. The planner must be "greedy", without a budget.

    Returns:
        A plan for each, sound by itself, that `check_lockstep` finds nothing wrong with. The time of an action is the
        slowest replica's.

    Raises:
        InfeasibleError: nothing fits the caps, or one replica has too few tokens for the chunks that another needs.
        PlanError: the arguments make no sense, the problems differ in more than their lengths, or (a bug) the plans do not pass
            the checks.
    """
    require_equal(problems, costs, options)
    if options.planner != "greedy" or options.budget_ms:
        remedy = Remedy("drop", "budget_ms") if options.planner == "greedy" else Remedy("set", "planner", "greedy")
        raise PlanError("only the planner greedy, without a time budget, plans replicas that share experts", remedy)

    def planned(asked: Problem) -> tuple[Plan, ...]:
        replicas = Replicas(with_room_of(asked, problems), costs, options)
        best = found(replicas)
        return written(replicas, best.made, best.tables)

    return planned_with_room(problems[0], planned)


def with_room_of(asked: Problem, problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the problems with the caps of another, and with as much memory set aside for messages."""
    return tuple(replace(problem, cap_bytes=asked.cap_bytes, message_bytes=asked.message_bytes) for problem in problems)


def written(replicas: Replicas, made: Sequence[Decisions], tables: Sequence[Tables]) -> tuple[Plan, ...]:
    """Write the plans of replicas in lockstep.

    Args:
        replicas: their problems.
        made, tables: of every replica; the tables have the times of the slowest, and the recompute modes.

    Raises:
        PlanError: a plan does not pass `check`, or the plans do not match.
    """
    every = zip(replicas.problems, made, tables, strict=True)
    plans = tuple(build_plan(problem, replicas.costs, replicas.options, one, own) for problem, one, own in every)
    if faults := check_lockstep(plans):
        raise PlanError("plans of replicas that share experts do not match: " + "; ".join(map(str, faults[:3])))
    return plans


def require_equal(problems: Sequence[Problem], costs: Costs, options: Options) -> None:
    """Raise `PlanError` if a problem makes no sense, there is none, or one differs from the first in more than its lengths.

    Args:
        problems, costs, options: as `plan_lockstep` takes them.
    """
    for problem in problems:
        validate(problem, costs, options)
    if not problems:
        raise PlanError("replicas that share experts need a problem each; there are none")
    for replica, problem in enumerate(problems):
        for name in (field.name for field in fields(Problem) if field.name not in ("lengths", "trained", "loss_groups")):
            first, own = getattr(problems[0], name), getattr(problem, name)
            if own != first:
                raise PlanError(
                    f"replicas that share experts run in lockstep and differ in nothing but their lengths: {name} of replica "
                    f"{replica} is {own}, that of replica 0 is {first}; give all the same"
                )


def found(replicas: Replicas) -> Candidate:
    """Search, and split weight gradients off where that is asked for. Raises `InfeasibleError`."""
    trials = Trials(replicas)
    search(trials)
    if trials.best is None and not trials.least_cap:
        fewest = min(sum(problem.lengths) for problem in replicas.problems)
        raise InfeasibleError(
            f"replicas that share experts need as many chunks each, and one that has {fewest} tokens in all has too few",
            Remedy("raise", "global_batch_size"),
            Remedy("raise", "chunk_tokens"),
            Remedy("lower", "slices"),
            Remedy("lower", "expert_parallel"),
        )
    best = trials.result()
    order = _split(best, replicas) if replicas.splits_weight else best.made[0].order
    return replace(best, made=tuple(replace(one, order=order, modes=FULL_ONLY) for one in best.made))  # the tables have modes


def _split(best: Candidate, replicas: Replicas) -> Order:
    """Split weight gradients off the order, equally for all replicas.

    Exchanges then come at the same times everywhere, so that all replicas issue receives at the same positions among them. A
    replica's own split is a candidate where it fits all.
    """
    whole, recompute_steps = best.order, best.made[0].recompute_steps
    every = [(tables, made.as_offload) for tables, made in zip(best.tables, best.made, strict=True)]
    caps = replicas.problems[0].cap_bytes
    split = (coded(with_split_weights(whole, *one, caps)[0], whole.num_chunks) for one in every)
    orders = {one.key: one for one in split}.values()
    fitting = [order for order in orders if all(is_within(peaks(order, *one), caps) for one in every)]
    return min([whole, *fitting], key=lambda order: makespan_us(order, best.tables[0], recompute_steps))
