"""Answers of the planning process to a training (`port.planning`)."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from dataclasses import replace

from megatron_epp import planner
from megatron_epp.cost.blocks import HEAD, INPUT, LAYER, BlockCosts, StageCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.model import Costs, PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.features import batch_target
from megatron_epp.plan import EppError, Op, Plan
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.problem import LockstepGroups, Options, Problem
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.service.replica_balance import Division, divide
from megatron_epp.port.pack_plan import pack
from megatron_epp.port.packed import PackedPlans

CACHED_PLANS = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context. Not measured: other batches
hardly ever come again, and each plan takes memory.
"""
LOADED_OPTIONS = (Options(split_weight=True), Options(offload=True))
"""Options that use all loops of the default planner."""


@functools.cache
def load_planner(options: tuple[Options, ...] = LOADED_OPTIONS) -> None:
    """Plan a small batch by the default planner with some options, without and with memory caps that matter, once in a process.

    Compiled loops are read from disk, which takes longer than most plans, or compiled, which takes 10 to 25 s of a core.
    """
    line, kv = LinearTime(1.0, 0.1, 1e-4), KVBytes(bytes_per_token=64.0, heads=4)
    layers = BlockCosts(kind=LAYER, count=2, forward=line, backward=line.scaled(2), weight=line, bytes_per_token=512.0, kv=kv)
    stages = (StageCosts((BlockCosts(kind=INPUT), layers, BlockCosts(kind=HEAD))),) * 2
    costs = PipelineCosts("small", stages, 128.0, host_us_per_byte=1e-3)
    problem = Problem((70, 9, 33, 64, 12, 5), (0, 1), (planner.UNLIMITED_BYTES,) * 2)
    for asked in options:
        settings = replace(asked, planner="greedy", steps=1, chunk_tokens=None, slices=None, context=None)
        cap_bytes = tuple(int(0.8 * peak) for peak in planner.plan(problem, costs, settings).predicted.peak_bytes)
        planner.plan(replace(problem, cap_bytes=cap_bytes), costs, settings)


def load(options: Options) -> None:
    with contextlib.suppress(EppError):  # told where a batch is planned
        load_planner((options,))


def plans_of_batch(
    problem: Problem, costs: Costs, options: Options, lockstep_group: int, lockstep_groups: LockstepGroups, grain: float
) -> PackedPlans:
    """Divide a batch over replicas, and plan the shares of a group's. Arguments as in `port.planning.BackgroundPlanner`."""
    start_s = time.perf_counter()
    if (share := batch_target(problem, "divisible")) is not None:
        problem = share(problem, sum(map(len, lockstep_groups)))
    division = _division(problem, costs, options, lockstep_groups)
    shares = [division.shares[replica] for replica in lockstep_groups[lockstep_group]]
    problems = tuple(map(problem.part, shares))
    plans = _plans(problems, costs, options)
    if grain != 1.0 and options.slices is None and options.chunk_tokens is None:
        parts = Counter((id(plan), part.sequence) for plan in plans for chunk in plan.chunks for part in chunk.segments)
        times_us = [step.time_us for row in plans[0].ranks for step in row if step.action[:2] == (Op.F, 0)]
        asked = replace(options, chunks=grain * sum(times_us) / max(times_us))  # of the largest: the ends are smaller
        if not begins_with_greedy(options.planner):
            asked = replace(options, slices=max(1, round(grain * max(parts.values()))))
        with contextlib.suppress(EppError):
            plans = _plans(problems, costs, asked)
    planning_us = (time.perf_counter() - start_s) * 1e6
    return tuple(pack(plan, planning_us, share, division.checksum) for plan, share in zip(plans, shares, strict=True))


@functools.lru_cache(CACHED_PLANS)
def _plans(problems: tuple[Problem, ...], costs: Costs, options: Options) -> tuple[Plan, ...]:
    if len(problems) > 1:
        return plan_lockstep(problems, costs, options)
    return (planner.plan(problems[0], costs, options),)


@functools.lru_cache(CACHED_PLANS)
def _division(problem: Problem, costs: Costs, options: Options, lockstep_groups: LockstepGroups) -> Division:
    if lockstep_groups == ((0,),):
        return Division((tuple(range(len(problem.lengths))),), (0.0,))

    def slowest_us(shares: tuple[Problem, ...]) -> float:
        return max(about_us(share, costs, options) for share in shares)

    return divide(problem, costs, lockstep_groups, slowest_us)
