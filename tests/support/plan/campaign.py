"""Judgement of plans of random problems: checked, simulated a second time, run on machines with hardware queues.

A cap that a refusal names has to do. A tenth more memory may make no plan of the default planner slower by more than 1 %.
"""

from collections.abc import Iterator

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import EppError, InfeasibleError, Op, Plan, Recompute
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.proof.lockstep import check_lockstep
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.spans import parted
from megatron_epp.planner import Options
from megatron_epp.planner.memory.breakdown import memory_breakdown
from tests.support.plan import second_simulator
from tests.support.plan.campaign_cases import Case, planned, plans_of, with_caps
from tests.support.plan.queue_machine import stuck_together

MACHINES = ((1, 0.0), (1, 0.1), (8, 0.1), (32, 0.0))
"""Hardware queues, and how likely a host waits for its device before a launch."""
KNOWN = {Op.F, Op.B, Op.W, Op.O, Op.L, Op.S, Op.N, Op.T}
"""Operations that the second simulator and the machines know."""
MORE_MEMORY, SLOWER, SLOWER_WITH_MORE = 1.1, 1.01, "more memory makes it slower"


def faults_of(plans: tuple[Plan, ...], seed: int) -> Iterator[str]:
    """Yield what is wrong with a plan, or with those of replicas that share experts, side by side."""
    yield from (str(fault) for plan in plans for fault in check(plan))
    actions = (action for plan in plans for row in plan.ranks for step in row for action in step.actions)
    if not {action.op for action in actions} <= KNOWN or plans[0].extensions:
        return
    yield from (fault for plan in plans for fault in second_simulator.faults(plan))
    rows, lockstep = [lower(plan) for plan in plans], len(plans) > 1
    yield from (f"blocked: {at}" for at in blocked(rows, lockstep))
    texts = [(to_json(plan), to_grid(row)) for plan, row in zip(plans, rows, strict=True)]
    for queues, waits in MACHINES:
        if left := stuck_together(texts, lockstep, queues, waits, seed):
            yield f"{queues} queues, waits {waits}: {left} never end"


def faults_of_answer(case: Case, plans: tuple[Plan, ...]) -> Iterator[str]:
    """Yield what plans lack of what was asked for."""
    yield from map(str, check_lockstep(plans))
    if len({timeline.start_us for timeline in map(simulate, plans)}) > 1:
        yield "a replica waits for another"
    for asked, plan in zip(case.problems, plans, strict=True):
        if plan.lengths != asked.lengths or from_json(to_json(plan)) != plan:
            yield "the plan is of another batch, or comes back from JSON as another one"
        if asked.spans:
            yield from filter(None, [parted(plan.chunks, plan.lengths, asked.spans)])
        yield from _faults_of_settings(plan, case.options)
        yield from _faults_of_groups(plan, asked.loss_groups)
        if not plan.extensions:
            yield from faults_of_breakdown(plan, case.costs)


def _faults_of_settings(plan: Plan, options: Options) -> Iterator[str]:
    """Yield what the default planner does not do of what the user fixed."""
    if options.planner != "greedy":
        return
    if options.chunk_tokens and max(map(plan.padded_tokens, range(len(plan.chunks)))) > options.chunk_tokens:
        yield f"a chunk has more than {options.chunk_tokens} tokens"
    segments = [part for chunk in plan.chunks for part in chunk.segments]
    if any(part.end % plan.token_multiple and part.end < plan.lengths[part.sequence] for part in segments):
        yield f"a slice ends on no multiple of {plan.token_multiple}"
    if options.recompute != "auto" and not plan.forward_only:
        for layers, row in zip(plan.num_layers, plan.recompute, strict=True):
            if {*row} != {Recompute(min(options.recompute, layers))}:
                yield f"{options.recompute} layers are to recompute"


def _faults_of_groups(plan: Plan, loss_groups: tuple[int, ...]) -> Iterator[str]:
    """Yield groups of which a backward runs on the stage with the loss before all their forwards have."""
    last = plan.num_stages - 1
    actions = [action for action in plan.actions(plan.placement[last]) if action.stage == last]
    place = {(action.op, action.chunk): at for at, action in enumerate(actions)}
    for number in set(loss_groups):
        own = {c for c, chunk in enumerate(plan.chunks) for part in chunk.segments if loss_groups[part.sequence] == number}
        if len(own) > 1 and not any(own <= set(group) for group in plan.loss_groups):
            yield f"the plan does not name loss group {number}"
        if not plan.forward_only and max(place[Op.F, c] for c in own) > min(place[Op.B, c] for c in own):
            yield f"loss group {number} has a backward before all its forwards"


def faults_of_breakdown(plan: Plan, costs: PipelineCosts) -> Iterator[str]:
    """Yield steps and ranks whose bytes by item are not those that they have."""
    breakdown = memory_breakdown(plan, costs)
    for step in (step for _, rows in plan.tables for row in rows for step in row):
        takes, gives = (sum(bytes_of[step.action].values()) for bytes_of in (breakdown.takes, breakdown.gives))
        if (takes, gives) != (step.alloc_bytes, step.free_bytes):
            yield f"items of {step} take {takes} and give {gives} bytes"
    for rank, static in enumerate(plan.static_bytes):
        moments = breakdown.moments(rank)
        if [(moment.time_us, moment.num_bytes) for moment in moments] != breakdown.timeline.live_bytes(rank):
            yield f"items of rank {rank} are not its live bytes"
        if breakdown.peak(rank).num_bytes != breakdown.timeline.peak_bytes[rank] or static != sum(moments[-1].items.values()):
            yield f"items of rank {rank} are not its peak, or not its static bytes at the end"


def faults_of_refusal(case: Case, error: EppError) -> Iterator[str]:
    """Yield what is wrong with a refusal: a planner's mistake, more than a line, or a cap that does not do."""
    if "made a plan that cannot run" in str(error) or "failed" in str(error):
        yield str(error)
    if isinstance(error, InfeasibleError) and error.least_cap_bytes:
        if error.least_cap_bytes <= min(case.problem.cap_bytes):
            yield f"a cap of {error.least_cap_bytes} bytes would do, and caps are {case.problem.cap_bytes}"
        caps = tuple(max(cap, error.least_cap_bytes) for cap in case.problem.cap_bytes)
        try:
            plans_of(with_caps(case, caps))
        except EppError as again:
            yield f"the cap that was named does not do: {again}"


def is_slower_with_more(case: Case, plan: Plan) -> bool:
    """Return True if more memory makes the default planner's plan of one pipeline slower."""
    if case.options.planner != "greedy" or case.others:
        return False
    more = with_caps(case, tuple(int(cap * MORE_MEMORY) for cap in case.problem.cap_bytes))
    return planned(more).predicted.makespan_us > SLOWER * plan.predicted.makespan_us


def judged(case: Case, seed: int) -> tuple[bool, list[str]]:
    try:
        plans = plans_of(case)
    except EppError as error:
        return False, list(faults_of_refusal(case, error))
    faults = [*faults_of(plans, seed), *faults_of_answer(case, plans)]
    if is_slower_with_more(case, plans[0]):
        faults.append(SLOWER_WITH_MORE)
    return True, faults
