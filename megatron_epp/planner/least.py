"""The least memory with which a batch can be planned, and the refusal that names it.

With one stage per rank no order of a chunk table keeps less than `LEAST`'s, in which one sequence is alive at a time. So a
table fits under a cap if and only if it does in that order, and one order of every table is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise, product
from operator import add, itemgetter

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import joined_work
from megatron_epp.features import plan_targets
from megatron_epp.plan import Chunk, InfeasibleError, Plan, Step
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.lowering import issue_order
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.simulation import play
from megatron_epp.planner.assemble import build_plan, refuse_without_room, written
from megatron_epp.planner.candidates import Candidates
from megatron_epp.planner.chunk_tables import ChunkTables, whole_by_length
from megatron_epp.planner.chunks.in_runs import Aligned
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import RecomputeFit
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.kernels.codes import CodedOrder, coded
from megatron_epp.planner.message_room import MessageRoomError, message_room, proven_cap, raised, with_room
from megatron_epp.planner.order import has_groups, slice_groups
from megatron_epp.planner.orders.warm_up import WarmUp
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.settings import ONE_STAGE, STREAMING, WHOLE, Recipe, first_recipe, values_of
from megatron_epp.planner.tables import Tables, tabulate, work_of_table
from megatron_epp.planner.validation import validate

LEAST = WarmUp(lead=0, minimal=True)
_NEAR_DIVISOR = 256
"""One part in so many of a cap is the least that another table must save for its plan to be written, too."""
_MESSAGES_RATIO = 1.0625
"""Bytes of a table, as a multiple of the least of all, from which on messages of others will hardly make it the least."""
Floors = list[tuple[int, Aligned]]


@dataclass(frozen=True, slots=True)
class MemoryProof:
    """Decisions under which a batch fits, and the peak of the fullest rank, with the messages that `problem` has room for."""

    problem: Problem
    decisions: Decisions
    peak_bytes: int


def one_order_decides(problem: Problem, options: Options) -> bool:
    """Return True if a chunk table that does not fit in the order of `LEAST` fits in no order."""
    is_simple = problem.has_one_stage_per_rank and not problem.borrowed
    return begins_with_greedy(options.planner) and not options.offload and is_simple


def may_fit(problem: Problem, costs: Costs, options: Options) -> bool:
    """Return False if no table fits, in any order and with any copies. A table that fits is soon found."""
    validate(problem, costs, options)
    if not begins_with_greedy(options.planner):
        return True
    if not one_order_decides(problem, options) and (
        problem.forward_only or has_groups(problem.loss_groups) or problem.borrowed
    ):
        return True
    replicas = Replicas((problem,), costs, options)
    chunk_tables = ChunkTables(replicas)
    first = chunk_tables.table(first_recipe(problem, options, ONE_STAGE, next(iter(chunk_tables.cuts))))
    has_floor = first is None or bool(_floors([first], problem, costs, options)[0])
    if first is not None and not has_floor and _fit(replicas, first)[2].recompute_steps is not None:
        return True  # as most do, without all other tables
    return any(not floor for floor, _ in _needs(problem, costs, options))


def least_or_refuse(
    problem: Problem, costs: Costs, options: Options, least_host: int, planned: Callable[[Candidates], tuple[Plan, ...]]
) -> tuple[Plan, ...]:
    """Plan a batch of which the search found no plan, in the order of `LEAST` unless one by `planned` fits, too.

    Raises `InfeasibleError`, with the host memory that the search found to be enough, if no order fits.
    """
    try:
        proof = proven(problem, costs, replace(options, offload=False))
    except InfeasibleError as plain:
        if not options.offload:
            raise
        refused = infeasible(problem, costs, options, plain.least_cap_bytes, least_host)
        raise refused.with_context(after=" That would do without offload; with it less may do.") from None
    with suppress(InfeasibleError):  # a faster order may fit the same table
        return planned(every_order(Replicas((proof.problem,), costs, options), proof.decisions.chunks))
    return (build_plan(proof.problem, costs, options, proof.decisions),)


def every_order(replicas: Replicas, chunks: tuple[Chunk, ...]) -> Candidates:
    """Try all orders of a chunk table of one replica, and copies with the fastest of them."""
    free = Candidates(replicas.without_caps, chunks=chunks)
    candidates, values = Candidates(replicas, free), free.values
    first = first_recipe(free.problem, free.options, free.orders, values["cut"][0])
    for reach, lead in product(values["reach"], values["lead"]):
        free.of(first._replace(reach=reach, lead=lead))
        candidates.of(first._replace(reach=reach, lead=lead))
    for walk_on in plan_targets(candidates.problem, candidates.options, "search"):
        walk_on(candidates, candidates.best(), free.best())
    return candidates


def proven(problem: Problem, costs: Costs, options: Options) -> MemoryProof:
    """Return the proof that a batch fits, with one stage per rank. Raises `InfeasibleError` with the smallest cap that would do
    if no table fits, and `PlanError` as `plan` does.
    """
    validate(problem, costs, options)
    floors = Floors()
    for floor, table in _needs(problem, costs, options):
        least = floor
        if not floor:
            try:
                return _of_table(problem, costs, options, table)
            except InfeasibleError as error:
                least = error.least_cap_bytes
            except MessageRoomError:
                least = min(problem.cap_bytes) + 1
        floors.append((least, table))
    raise _refusal(problem, costs, options, floors)


def _refusal(problem: Problem, costs: Costs, options: Options, floors: Floors) -> InfeasibleError:
    """Return the error that names the smallest cap of all tables, to less than half a percent."""
    replicas, needs, least = Replicas((problem,), costs, options), Floors(), 0
    for floor, table in sorted(floors, key=itemgetter(0)):
        if not needs or floor < min(needs, key=itemgetter(0))[0] * _MESSAGES_RATIO:
            needs.append((_fit(replicas, table)[2].needed_bytes or floor, table))
    for need, table in sorted(needs, key=itemgetter(0)):
        if not least or need < least - least // _NEAR_DIVISOR:
            cap = proven_cap(need, partial(_under_cap, problem, costs, options, table))
            least = min(least or cap, cap)
    return infeasible(problem, costs, options, least)


def _under_cap(problem: Problem, costs: Costs, options: Options, table: Aligned, cap_bytes: int) -> MemoryProof:
    return _of_table(raised(problem, cap_bytes), costs, options, table)


def _needs(problem: Problem, costs: Costs, options: Options) -> Iterator[tuple[int, Aligned]]:
    """Yield every table, and bytes that it needs at least where it does not fit.

    Where one order decides, the bytes are 0 only if it fits, but for its messages.
    """
    replicas = Replicas((problem,), costs, options)
    tables = [*_tables(replicas)]
    for floor, table in zip(_floors(tables, problem, costs, options), tables, strict=True):
        if floor or not one_order_decides(problem, options):
            yield floor, table
        else:
            yield _fit(replicas, table)[2].needed_bytes, table


def _floors(tables: Sequence[Aligned], problem: Problem, costs: Costs, options: Options) -> list[int]:
    """Return bytes that tables need in any order, of those that do not fit, and 0 for others, which need not fit.

    Before a sequence's first backward, on the last stage of a rank, all of its slices are alive on all stages of the rank. So
    the longest sequence of each table is looked at alone, and that of all tables at once, with full recompute. With copies to
    the host one slice at a time is there, with or without its keys and values.
    """
    if problem.forward_only:
        return [0] * len(tables)
    runs = list[tuple[Chunk, ...]]()
    for (chunks,) in (table.chunks for table in tables):
        own = [chunks[run.start : run.stop] for run in slice_groups(chunks, problem.loss_groups)]
        runs.append(max(own, key=lambda run: sum(chunk.num_tokens for chunk in run)))
    # Without the caches of sequences that begin behind others, which only add to what is needed.
    work = joined_work([replace(work_of_table(run, problem), begun=None) for run in runs])
    sizes = tabulate([*chain.from_iterable(runs)], problem, costs, work=work)
    away = sizes
    if options.offload:
        away = tabulate([*chain.from_iterable(runs)], problem, costs, work=replace(work, cache_tokens=0 * work.cache_tokens))
    starts = [*accumulate(map(len, runs), initial=0)]
    ends = np.array(starts[1:]) - 1
    rooms = [message_room(problem, sizes.message_bytes[begin:stop]) for begin, stop in pairwise(starts)]
    lacking = np.zeros((problem.num_ranks, len(tables)), dtype=np.int64)
    needed = 0 * lacking
    for rank, stages in enumerate(sizes.stages_of):
        every = [sizes.passes[stage] for stage in stages]
        streamed = [away.passes[stage] for stage in stages]
        alive = sum(own.ways.kept_bytes[:, -1] + own.forward_alloc for own in every)
        passing = np.max([np.minimum(own.passing, other.passing) for own, other in zip(every, streamed, strict=True)], axis=0)
        if options.offload:
            alone = [np.minimum(a.ways.whole, b.ways.whole).min(axis=1) for a, b in zip(every, streamed, strict=True)]
            needed[rank] = np.maximum.reduceat(np.max(alone, axis=0), starts[:-1])
        else:
            first_backward = every[-1].ways.whole.min(axis=1) - every[-1].ways.kept_bytes[:, -1]
            needed[rank] = np.add.reduceat(alive, starts[:-1]) + first_backward[ends]
        needed[rank] += np.maximum.reduceat(passing, starts[:-1]) + [room[rank] for room in rooms]
        needed[rank] += sum(map(costs.static_bytes, stages))
        lacking[rank] = needed[rank] > problem.cap_bytes[rank]
    floors: list[int] = (needed.max(axis=0) * lacking.any(axis=0)).tolist()
    return floors


def _of_table(problem: Problem, costs: Costs, options: Options, table: Aligned) -> MemoryProof:
    """Return the proof that a table fits, from a plan that is lowered for its messages, but neither checked nor simulated.
    Raises `InfeasibleError` if it does not fit, and `MessageRoomError` if only its messages do not.
    """

    def proof(asked: Problem) -> MemoryProof:
        tables, order, fit = _fit(Replicas((asked,), costs, options), table)
        if fit.recompute_steps is None:
            raise infeasible(asked, costs, options, fit.needed_bytes)
        decisions = Decisions(table.chunks[0], order, fit.recompute_steps, options.modes(costs.recompute_modes))
        plan = written(asked, costs, options, decisions, tables)
        peaks = tuple(map(_peak_bytes, plan.static_bytes, plan.ranks))
        needed = (0,) * len(peaks)
        if plan.messages.num_bytes:
            graph = build_graph(plan)
            needed = message_peaks(plan, issue_order(plan, graph, play(graph)))
            refuse_without_room(plan, peaks, needed)
        return MemoryProof(asked, decisions, max(map(add, peaks, needed)))

    return with_room(problem, proof)


def _peak_bytes(static_bytes: int, row: Sequence[Step]) -> int:
    live = peak = static_bytes
    for step in row:
        live += step.alloc_bytes
        peak = max(peak, live)
        live -= step.free_bytes
    return peak


def _fit(replicas: Replicas, table: Aligned) -> tuple[Tables, CodedOrder, RecomputeFit]:
    problem, sizes = replicas.problems[0], replicas.tables(table)
    order = coded(LEAST.order(table.stand_in(problem.loss_groups), sizes[0], problem), len(table))
    return sizes[0], order, replicas.fit(order.codes, sizes)


def _tables(replicas: Replicas) -> Iterator[Aligned]:
    """Yield the tables that the search tries, grains, runs and whole sequences.

    Keys and values of slices stay until the backward of a sequence's first slice. Those of a whole sequence that recomputes
    stay as long as one layer does, so it may fit where its slices do not.
    """
    problem, options, chunk_tables = replicas.problems[0], replicas.options, ChunkTables(replicas)
    values, known = values_of(problem, options, ONE_STAGE, chunk_tables.cuts, splits=False), set[int]()
    copies = ("none", STREAMING[0]) if options.offload and options.kv_offload else ("none",)
    for away, cut, grain in product(copies, values["cut"], values["grain"]):
        table = chunk_tables.table(Recipe(grain, cut, copies=away)) if grain != WHOLE else None
        if table is not None and id(table) not in known:
            known.add(id(table))
            yield table
    may_be_whole = max(problem.lengths) <= (options.chunk_tokens or max(problem.lengths)) and not problem.microbatches
    if options.slices is None and may_be_whole:
        yield from (Aligned((chunks,)) for chunks in whole_by_length(problem))
