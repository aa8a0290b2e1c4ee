"""What the planning process of a training runs (`port.planning`)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron_epp import planner
from megatron_epp.cost import BlockCosts, Costs, LinearTime, PipelineCosts, StageCosts
from megatron_epp.cost.blocks import HEAD, INPUT, LAYER
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.problem import LockstepGroups, Options, Problem
from megatron_epp.planner import microbatches
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.memory.breakdown import peak_items
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.service.replica_balance import Division, divide
from megatron_epp.port.packed import PackedPlan, PackedPlans

CACHED_PLANS = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context. Not measured: other batches
hardly ever come again, and each plan takes memory.
"""
LOADED_OPTIONS = (Options(split_weight=True), Options(offload=True))
"""Options that use all loops of the default planner."""


@functools.cache
def load_planner(options: tuple[Options, ...] = LOADED_OPTIONS) -> None:
    """Plan a small batch with some options, without and with memory caps that matter, as a process does once.

    The compiled loops are read from disk, which takes longer than most plans. Missing ones are compiled, which takes 10 to 25 s
    of a core.

    Planners of other schedules and of users run as they are only where a batch is planned: they use some of these loops.

    Args:
        options: to plan with, by the default planner; of their local search one step is taken.
    """
    line, kv = LinearTime(1.0, 0.1, 1e-4), KVBytes(bytes_per_token=64.0, heads=4)
    layers = BlockCosts(kind=LAYER, count=2, forward=line, backward=line.scaled(2), weight=line, bytes_per_token=512.0, kv=kv)
    stages = (StageCosts((BlockCosts(kind=INPUT), layers, BlockCosts(kind=HEAD))),) * 2
    costs = PipelineCosts("small", stages, 128.0, host_us_per_byte=1e-3)
    problem = Problem((70, 9, 33, 64, 12, 5), (0, 1), (planner.UNLIMITED_BYTES,) * 2)
    for asked in options:
        settings = replace(asked, planner="greedy", steps=1, chunk_tokens=None, slices=None, context=None)
        free = planner.plan(problem, costs, settings)
        cap_bytes = tuple(int(0.8 * peak) for peak in free.predicted.peak_bytes)
        planner.plan(replace(problem, cap_bytes=cap_bytes), costs, settings)


def microbatch_planning() -> Callable[..., tuple[PackedPlan, tuple[int, ...]]]:
    load(Options())

    def packed(rule: str, *asked: Any) -> tuple[PackedPlan, tuple[int, ...]]:
        start_s = time.perf_counter()
        plan, order = getattr(microbatches, rule)(*asked)
        return PackedPlan.of(plan, (time.perf_counter() - start_s) * 1e6, ()), order

    return packed


def load(options: Options) -> None:
    with contextlib.suppress(EppError):  # told where a batch is planned
        load_planner((options,))


def planning(
    costs: Costs, options: Options, lockstep_group: int, lockstep_groups: LockstepGroups
) -> Callable[..., PackedPlans]:
    """Make the function that the process calls for every batch."""

    @functools.lru_cache(CACHED_PLANS)
    def plans_of(problems: tuple[Problem, ...], slices: int | None = options.slices) -> tuple[Plan, ...]:
        if len(problems) > 1:
            return plan_lockstep(problems, costs, replace(options, slices=slices))
        return (planner.plan(problems[0], costs, replace(options, slices=slices)),)

    def of_grain(plans: tuple[Plan, ...], problems: tuple[Problem, ...], grain: float) -> tuple[Plan, ...]:
        """Plan with so many times the slices that the fastest plans have; return these where no plan has so many."""
        slices = (Counter(segment.sequence for chunk in plan.chunks for segment in chunk.segments) for plan in plans)
        most = max(count for counts in slices for count in counts.values())
        with contextlib.suppress(EppError):
            return plans_of(problems, max(1, round(grain * most)))
        return plans

    @functools.lru_cache(CACHED_PLANS)
    def divided(problem: Problem) -> Division:
        if lockstep_groups == ((0,),):
            return Division((tuple(range(len(problem.lengths))),), (0.0,))

        def slowest_us(shares: tuple[Problem, ...]) -> float:
            return max(about_us(share, costs, options) for share in shares)

        return divide(problem, costs, lockstep_groups, slowest_us)

    tells_peak = True

    def packed(problem: Problem, grain: float = 1.0, is_run: bool = True) -> PackedPlans:
        nonlocal tells_peak
        start_s = time.perf_counter()
        division = divided(problem)
        shares = [division.shares[replica] for replica in lockstep_groups[lockstep_group]]
        problems = tuple(map(problem.part, shares))
        plans = plans_of(problems)
        if grain != 1.0 and options.slices is None and options.chunk_tokens is None:
            plans = of_grain(plans, problems, grain)
        planning_us = (time.perf_counter() - start_s) * 1e6
        tells_now = tells_peak and is_run and not problem.forward_only
        tells_peak &= not tells_now
        return tuple(
            PackedPlan.of(plan, planning_us, share, division.checksum, peak_items(plan, costs) if tells_now else None)
            for plan, share in zip(plans, shares, strict=True)
        )

    return packed
