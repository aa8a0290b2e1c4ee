"""Assembly of a plan from decisions: the one place that writes steps, messages and predictions, and has the result checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from operator import add, sub

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Action, Copy, Messages, Op, Plan, PlanError, Prediction, Remedy, Step, is_unlimited
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof import examine, report
from megatron_epp.plan.spans import parted
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import action_times, recompute_times
from megatron_epp.planner.fit import step_bytes
from megatron_epp.planner.kernels.codes import encode_known, kinds_of
from megatron_epp.planner.kernels.compiled import numbers
from megatron_epp.planner.memory.kv_offload_tables import kv_offload_entries
from megatron_epp.planner.message_room import MessageRoomError
from megatron_epp.planner.order import Order, joint_losses
from megatron_epp.planner.orders.completion import with_added
from megatron_epp.planner.tables import Tables


def build_plan(problem: Problem, costs: Costs, options: Options, decisions: Decisions, tables: Tables | None = None) -> Plan:
    """Turn decisions into a plan with the simulator's predictions.

    `tables` are those of the chunks, where something else than the costs alone decides times. Raises `MessageRoomError` if it
    fits its caps but for its messages in flight, and `PlanError`, with the report, if it cannot be written or fails `check`.
    """
    if cut := parted(decisions.chunks, problem.lengths, problem.spans):
        raise PlanError(f"by planner {options.planner!r} {cut}, which it does not know", Remedy("set", "planner", "greedy"))
    problem = decisions.padded(problem)
    tables = decisions.tables(problem, costs) if tables is None else tables
    plan = written(problem, costs, options, decisions, tables)
    faults, timeline, launches = examine(plan)
    if faults or timeline is None or launches is None:
        raise PlanError(cannot_run(options.planner) + report(plan, faults))
    # Streaming takes time too, and bound and makespan add in another order, so may differ in the last digit.
    at_best = replace(decisions, kv_offload=frozenset()).tables(problem, costs) if decisions.kv_offload else tables
    bound_us = min(lower_bound_us(at_best, decisions.chunks, problem, options), timeline.makespan_us)
    plan = replace(plan, predicted=Prediction(timeline.makespan_us, bound_us, timeline.peak_bytes, timeline.bubble_fraction))
    return _with_messages(plan, message_peaks(plan, launches)) if plan.messages.num_bytes else plan


def written(problem: Problem, costs: Costs, options: Options, decisions: Decisions, tables: Tables) -> Plan:
    """Turn decisions into a plan without predictions, which `check` has not seen."""
    order = with_added(decisions.order, tables, decisions.recompute_steps)
    if order is not decisions.order:
        decisions = decisions.reordered(order)
    writer = _Writer(tables, decisions)
    sizes = step_bytes(decisions.order, tables, decisions.recompute_steps, decisions.sharing)
    return Plan(
        lengths=problem.lengths,
        chunks=decisions.chunks,
        num_layers=costs.num_layers,
        placement=problem.placement,
        recompute=tuple(
            tuple(tables.recompute(stage, c, num_steps) for c, num_steps in enumerate(row))
            for stage, row in enumerate(decisions.recompute_steps)
        ),
        recompute_us=recompute_times(tables, decisions.recompute_steps),
        offload_share=writer.shares(),
        ranks=tuple(tuple(decisions.steps([*writer.steps(*row)], tables)) for row in zip(decisions.order, *sizes, strict=True)),
        copies=tuple(tuple(starmap(writer.copy, row)) for row in decisions.copies),
        host_links=tables.host_links if len(set(tables.host_links)) < problem.num_ranks else (),
        kv_offload=kv_offload_entries(decisions.chunks, problem, costs, decisions.kv_offload),
        host_cap_bytes=() if is_unlimited(problem.host_cap_bytes) else (problem.host_cap_bytes,) * problem.num_ranks,
        messages=_messages(tables, decisions.order),
        static_bytes=tuple(map(sub, map(sub, tables.static, tables.message_room), tables.added_room)),
        cap_bytes=problem.cap_bytes,
        predicted=Prediction.none(problem.num_ranks),
        extensions=decisions.extensions,
        token_multiple=problem.token_multiple,
        forward_only=problem.forward_only,
        loss_groups=joint_losses(decisions.chunks, problem.loss_groups),
        borrowed=problem.borrowed,
        costs=costs.name,
        planner=options.planner,
        seed=options.seed,
    )


def cannot_run(planner: str) -> str:
    return f"planner {planner!r} made a plan that cannot run\n"


def refuse_without_room(plan: Plan, peak_bytes: Sequence[int], message_bytes: tuple[int, ...]) -> None:
    """Raise `MessageRoomError` where messages in flight need more than the caps leave of the most bytes live without them."""
    above = [peak + size - cap for peak, size, cap in zip(peak_bytes, message_bytes, plan.cap_bytes, strict=True)]
    if max(above) > 0:
        rank = above.index(max(above))
        reason = f"{message_bytes[rank]} bytes of messages in flight on rank {rank} are {above[rank]} more than its cap leaves"
        raise MessageRoomError(reason, message_bytes)


def _with_messages(plan: Plan, message_bytes: tuple[int, ...]) -> Plan:
    refuse_without_room(plan, plan.predicted.peak_bytes, message_bytes)
    return replace(
        plan,
        static_bytes=tuple(map(add, plan.static_bytes, message_bytes)),
        message_bytes=message_bytes,
        predicted=replace(plan.predicted, peak_bytes=tuple(map(add, plan.predicted.peak_bytes, message_bytes))),
    )


def _messages(tables: Tables, order: Order) -> Messages:
    hops, used = tuple(tuple(row.tolist()) for row in tables.hops), kinds_of(order)
    rows = [own for op, own in tables.added.items() if op in used]
    collectives = tuple((op, tuple(times_us)) for own in rows for op, times_us in own.collective_us.items())
    messages = tuple((op, tuple(times_us)) for own in rows for op, times_us in own.message_us.items())
    return Messages(hops, hops, tables.message_bytes if any(tables.message_bytes) else (), collectives, messages)


class _Writer:
    def __init__(self, tables: Tables, decisions: Decisions) -> None:
        self.tables, self.decisions, self.offload = tables, decisions, decisions.as_offload
        codes = encode_known(decisions.order, tables.num_chunks)
        self.times_us = numbers(action_times(codes, tables, decisions.recompute_steps))
        num_items = tables.columns_with(codes.kinds).num_items
        self.first = {op: kind * num_items for kind, op in enumerate(codes.kinds)}

    def steps(self, row: Sequence[Action], takes: Sequence[int], gives: Sequence[int]) -> Iterator[Step]:
        """Yield a step for each action of a rank, which allocates and frees these bytes (`step_bytes`)."""
        for action, alloc_bytes, free_bytes in zip(row, takes, gives, strict=True):
            op, site, c = action
            yield Step(action, self.times_us[self.first[op] + site * self.tables.num_chunks + c], alloc_bytes, free_bytes)

    def shares(self) -> tuple[tuple[float, ...], ...]:
        stages, chunks = range(len(self.tables.num_layers)), range(len(self.decisions.chunks))
        if not self.offload.shares:
            return ((0.0,) * len(chunks),) * len(stages)
        return tuple(tuple(self._share(stage, c) for c in chunks) for stage in stages)

    def _share(self, stage: int, c: int) -> float:
        """Share of a chunk's kept bytes that is offloaded: as decided, but at least the input of one layer."""
        share, moved = self.offload.shares[stage][c], self.offload.moved(self.tables, stage, c)
        kept_bytes = self.tables.kept_bytes(stage, c, self.offload.recompute_steps[stage][c])
        return share if moved == int(kept_bytes * share) else moved / kept_bytes

    def copy(self, action: Action, after: Action | None) -> Copy:
        op, stage, c = action
        moved = self.offload.moved(self.tables, stage, c)
        return Copy(action, self.tables.host_us(moved), *((0, moved) if op is Op.O else (moved, 0)), after)
