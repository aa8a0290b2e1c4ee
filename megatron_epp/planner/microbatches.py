"""Plans for a caller's microbatches, each of which runs whole, in a chunk of its own."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain
from typing import Any

from megatron_epp import planner
from megatron_epp.cost.model import Costs
from megatron_epp.cost.whole_microbatches import without_cache
from megatron_epp.features import batch_target
from megatron_epp.plan import UNLIMITED_BYTES, Chunk, Op, Plan
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.given_order import in_given_order
from megatron_epp.planner.message_room import planned_with_room
from megatron_epp.planner.search import SMALL_PLAN_ITEMS
from megatron_epp.planner.settings import orders_of
from megatron_epp.planner.tables import tabulate
from megatron_epp.port.pack_plan import pack
from megatron_epp.port.packed import MicrobatchLengths, OrderedPlan, PackedPlan, chunks_of

_STEPS = 500
"""Steps of local search, 25 ms for 16 microbatches on two stages. There 20,000 gain 1 % more in the time of an iteration."""


def packed(rule: str, *asked: Any) -> tuple[PackedPlan, tuple[int, ...]]:
    """Return the plan by another function of this module, and the microbatch of each of its chunks."""
    start_s = time.perf_counter()
    plan, order = globals()[rule](*asked)
    return pack(plan, (time.perf_counter() - start_s) * 1e6, ()), order


def plan_microbatches(microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options) -> OrderedPlan:
    """Plan whole microbatches in the best of three orders: as given, longest first, and shortest first.

    Options of cutting and packing are ignored. Raises `InfeasibleError` if nothing that was tried fits the caps.
    """
    _, problem = _problem_of(microbatches, problem)
    numbers = tuple(number for number, lengths in enumerate(microbatches) for _ in lengths)
    is_small = problem.num_stages * len(microbatches) <= SMALL_PLAN_ITEMS
    asked = replace(options, chunk_tokens=None, slices=None, steps=_STEPS if is_small else 0)
    problem, make = replace(problem, microbatches=numbers), batch_target(problem, "whole")
    best = make(problem, costs, asked) if make else planner.plan(problem, without_cache(costs), asked)
    return OrderedPlan(best, tuple(numbers[chunk.segments[0].sequence] for chunk in best.chunks))


def plan_as_given(microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options) -> OrderedPlan:
    """Plan whole microbatches in the caller's order and in 1F1B, without caps: as many are alive as in Megatron's schedules."""
    chunks, problem = _problem_of(microbatches, replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks))
    order = orders_of(problem, options).as_given.order(chunks, tabulate(chunks, problem, costs), problem)
    if options.split_weight and costs.splits_weight:  # W right behind B: it is measured, and nothing more is kept
        both = [[(action, action._replace(op=Op.W))[: 1 + (action.op is Op.B)] for action in row] for row in order]
        order = tuple(tuple(chain.from_iterable(row)) for row in both)
    decisions = fitted(order, chunks, problem, costs, options)
    return OrderedPlan(build_plan(problem, costs, options, decisions), tuple(range(len(chunks))))


def plan_in_order(
    microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options, *, plain: bool = False
) -> OrderedPlan:
    """Plan whole microbatches so that all stages run forwards and backwards in the caller's order (`in_given_order`)."""
    chunks, problem = _problem_of(microbatches, problem)

    def make(asked: Problem) -> Plan:
        return build_plan(asked, costs, options, in_given_order(chunks, asked, costs, options, plain))

    return OrderedPlan(planned_with_room(problem, costs, options, make), tuple(range(len(chunks))))


def plan_in_order_as_given(microbatches: MicrobatchLengths, problem: Problem, costs: Costs, options: Options) -> OrderedPlan:
    """Plan as `plan_in_order` does, but in 1F1B and without caps."""
    problem = replace(problem, cap_bytes=(UNLIMITED_BYTES,) * problem.num_ranks)
    return plan_in_order(microbatches, problem, costs, options, plain=True)


def _problem_of(microbatches: MicrobatchLengths, problem: Problem) -> tuple[tuple[Chunk, ...], Problem]:
    return chunks_of(microbatches), replace(problem, lengths=tuple(length for lengths in microbatches for length in lengths))
