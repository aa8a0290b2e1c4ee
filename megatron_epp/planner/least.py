"""The least memory with which a batch can be planned, and the refusal that names it.

With one stage per rank no order of a chunk table keeps less than `LEAST`'s, in which one sequence is alive at a time. So a
table fits under a cap if and only if it does in that order, and one order of every table is tried, where the search tries many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Plan, Step
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.lowering import issue_order
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.plan.simulate import play
from megatron_epp.planner.assemble import build_plan, refuse_without_room, written
from megatron_epp.planner.chunk_tables import ChunkTables, whole_by_length
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.in_runs import Shape
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import RecomputeFit
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.kernels.codes import CodedOrder, coded
from megatron_epp.planner.message_room import MessageRoomError, planned_with_room, with_room
from megatron_epp.planner.orders.warm_up import WarmUp
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.registry import begins_with_greedy
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.settings import WHOLE, Recipe, values_of
from megatron_epp.planner.work_limit import spend

LEAST = WarmUp(lead=0, minimal=True)


def one_order_decides(problem: Problem, options: Options) -> bool:
    """Return True if a chunk table that does not fit in the order of `LEAST` fits in no order."""
    return begins_with_greedy(options.planner) and not options.offload and problem.has_one_stage_per_rank


def least_plan(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Return the first plan found under the caps, which need not be a fast one.

    Args:
        problem: the batch, the placement, of one stage per rank, and its caps.

    Raises:
        InfeasibleError: no table fits; the error names the smallest cap that would do.
        PlanError: as `plan` raises it.
    """
    asked, decisions = least_decisions(problem, costs, options)
    return build_plan(asked, costs, options, decisions)


def least_decisions(problem: Problem, costs: Costs, options: Options) -> tuple[Problem, Decisions]:
    """Return the decisions of `least_plan` and its problem, with memory set aside for messages. They prove that a batch fits.

    Args:
        problem, costs, options: as `least_plan` takes them, which has its errors.
    """
    validate(problem, costs, options)
    return planned_with_room(problem, costs, options, lambda asked: _proof(asked, costs, options))


def has_plan(problem: Problem, costs: Costs, options: Options) -> bool:
    """Return True if there is a `least_plan`, which is faster to know than the smallest cap."""
    validate(problem, costs, options)
    try:
        with_room(problem, lambda asked: _proof(asked, costs, options))
    except (InfeasibleError, MessageRoomError):
        return False
    return True


def _proof(asked: Problem, costs: Costs, options: Options) -> tuple[Problem, Decisions]:
    """Return decisions that fit, and their problem.

    The plan is written and lowered, which decides how many messages are in flight, but it is neither checked nor simulated.

    Raises:
        InfeasibleError: no table fits.
        MessageRoomError: the messages in flight do not fit.
    """
    least, decisions = 0, None
    for chunks, order, fit in _fits(asked, costs, options):
        if fit.recompute_steps is not None:
            decisions = Decisions(chunks, order, fit.recompute_steps, options.modes(costs))
            break
        least = min(least or fit.needed_bytes, fit.needed_bytes)
    if decisions is None:
        raise infeasible(asked, costs, options, least)
    plan = written(asked, costs, options, decisions, decisions.tables(asked, costs))
    if plan.messages.num_bytes:
        graph = build_graph(plan)
        needed = message_peaks(plan, issue_order(plan, graph, play(graph)))
        refuse_without_room(plan, tuple(map(_peak_bytes, plan.static_bytes, plan.ranks)), needed)
    return asked, decisions


def _peak_bytes(static_bytes: int, row: Sequence[Step]) -> int:
    """Return the most bytes live at one time on a rank: static bytes plus bytes of its steps, which run one by one."""
    live = peak = static_bytes
    for step in row:
        live += step.alloc_bytes
        peak = max(peak, live)
        live -= step.free_bytes
    return peak


def _fits(problem: Problem, costs: Costs, options: Options) -> Iterator[tuple[tuple[Chunk, ...], CodedOrder, RecomputeFit]]:
    """Yield the tables that the search tries, grains and whole sequences, in the order that keeps the least.

    A slice's keys and values stay, with their gradients, until the first slice of its sequence has run backward. With a whole
    sequence that recomputes they live as long as one layer does, so it may fit where its slices do not.
    """
    replicas = Replicas((problem,), costs, options)
    chunk_tables = ChunkTables(replicas)
    cuts = [name for name, cut in chunk_tables.cuts.items() if cut.shape in (None, Shape(1))]
    values = values_of(problem, options, cuts, splits=False)
    recipes = (Recipe(grain, cut) for cut in values["cut"] for grain in values["grain"] if grain != WHOLE)
    tables = dict.fromkeys(table for recipe in recipes if (table := chunk_tables.table(recipe)) is not None)
    may_be_whole = max(problem.lengths) <= (options.chunk_tokens or max(problem.lengths)) and not problem.microbatches
    if options.slices is None and may_be_whole:
        tables |= dict.fromkeys(Aligned((chunks,)) for chunks in whole_by_length(problem))
    for table in tables:
        spend(problem.num_stages * len(table))
        sizes = replicas.tables(table)
        order = coded(LEAST.order(table.stand_in(problem.loss_groups), sizes[0], problem), len(table))
        yield table.chunks[0], order, replicas.fit(order.codes, sizes)
