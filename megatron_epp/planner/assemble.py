"""From decisions to a plan: the one place that writes steps, messages and predictions, and has the result checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_epp.cost import Costs
from megatron_epp.planner.evaluate import Layers, backward_times, lower_bound_us
from megatron_epp.planner.order import Order
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.schedule import Action, Chunk, Messages, Op, Plan, PlanError, Prediction, Step
from megatron_epp.schedule.check import check, report
from megatron_epp.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Decisions:
    """All a planner decides.

    Attributes:
        chunks: the chunk table.
        order: the actions of every rank.
        layers: recomputed layers ``[stage][chunk]``.
    """

    chunks: tuple[Chunk, ...]
    order: Order
    layers: Layers


def build_plan(problem: Problem, costs: Costs, options: Options, made: Decisions) -> Plan:
    """Turn decisions into a plan with the simulator's predictions.

    Raises:
        PlanError: the result does not pass `check`. The message is its report.
    """
    tables = tabulate(made.chunks, problem, costs)
    backward_us = backward_times(tables, made.layers)
    hops = (tuple(tables.message_us),) * (problem.num_stages - 1)
    plan = Plan(
        lengths=problem.lengths,
        chunks=made.chunks,
        num_layers=costs.num_layers,
        placement=problem.placement,
        recompute_layers=tuple(map(tuple, made.layers)),
        offload_share=((0.0,) * len(made.chunks),) * problem.num_stages,
        ranks=tuple(_steps(actions, tables, backward_us, made.layers) for actions in made.order),
        messages=Messages(hops, hops),
        static_bytes=tables.static,
        cap_bytes=problem.cap_bytes,
        predicted=Prediction(0.0, 0.0, tables.static, 0.0),
        token_multiple=problem.token_multiple,
        forward_only=problem.forward_only,
        costs=costs.name,
        planner=options.planner,
        seed=options.seed,
    )
    if faults := check(plan):
        raise PlanError(f"planner {options.planner!r} made a plan that cannot run\n{report(plan, faults)}")
    timeline = simulate(plan)
    bound_us = min(lower_bound_us(tables), timeline.makespan_us)  # they add in another order, so may differ in the last digit
    return replace(plan, predicted=Prediction(timeline.makespan_us, bound_us, timeline.peak_bytes, timeline.bubble_fraction))


def _steps(actions: Sequence[Action], tables: Tables, backward_us: list[list[float]], layers: Layers) -> tuple[Step, ...]:
    steps = []
    for action in actions:
        op, stage, c = action
        kept = tables.kept_bytes(stage, c, layers[stage][c])
        if op is Op.F:
            alloc, free = kept + tables.forward_alloc[stage][c], tables.forward_free[stage][c]
            steps.append(Step(action, tables.forward_us[stage][c], alloc, free))
        else:
            rise = tables.rise_bytes(stage, c, layers[stage][c])
            steps.append(Step(action, backward_us[stage][c], rise, kept + tables.backward_free[stage][c] + rise))
    return tuple(steps)
