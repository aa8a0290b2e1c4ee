"""Order rules that the search tries. A new rule (`orders.warm_up.OrderRule`) enters it with one line in one of these tuples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_epp.planner.orders.capped import CappedWarmUp
from megatron_epp.planner.orders.list_scheduling import ListScheduling
from megatron_epp.planner.orders.patterns import BLOCKS, Block, Interleaved, is_looped, is_v
from megatron_epp.planner.orders.reversed_slices import ReversedSlices
from megatron_epp.planner.orders.spacing import SPLIT_UNITS, Spaced
from megatron_epp.planner.orders.unit_times import UnitTimes
from megatron_epp.planner.orders.warm_up import OneStagePerRank, OrderRule, WarmUp, elastic_1f1b
from megatron_epp.planner.problem import Problem

ELASTIC_1F1B = OneStagePerRank(elastic_1f1b)

FIRST: tuple[OrderRule, ...] = (WarmUp(lead=2, minimal=True), WarmUp(lead=2))
"""Rules that every grain is tried with."""
SECOND: tuple[OrderRule, ...] = (
    WarmUp(lead=1.5, minimal=True),
    WarmUp(lead=1, minimal=True),
    WarmUp(lead=1.5),
    WarmUp(lead=1),
    ELASTIC_1F1B,
)
"""Further rules for the best grain: less alive, less slack."""
CAPPED: tuple[OrderRule, ...] = (CappedWarmUp(3), CappedWarmUp(3, 1.5), CappedWarmUp(4, 1.5), CappedWarmUp(6, 1.5))
"""Rules for the best table with its sequences in other orders, where its plan is far from its bound: plans up to 7 % faster."""
HALF = WarmUp(lead=0.5, minimal=True)
LEAST: tuple[OrderRule, ...] = (WarmUp(lead=0, minimal=True),)
"""Rule of last resort: one sequence is alive at a time, and no order of a table keeps less. Where it was tried only if nothing
else fitted, more memory could make plans with fixed slices slower, and without it in KV offload by 30 %.
"""
ROOMY_LISTED: tuple[OrderRule, ...] = (ListScheduling(2), ListScheduling(1.5), ListScheduling(1), ListScheduling(3))
LIST_SCHEDULES: tuple[OrderRule, ...] = (
    ROOMY_LISTED[0],
    ListScheduling(2, alternating=True),
    *ROOMY_LISTED[1:],
    ListScheduling(1.5, alternating=True),
    ListScheduling(1, alternating=True),
    ListScheduling(2.5, alternating=True),
    ListScheduling(0.75),
    ListScheduling(0.5),
)
"""Rules for any other placement than one stage per rank in order, the first two for every grain. Alternating ones, interleaved
1F1B and blocks of a V made plans up to 18 % faster than rules with backwards first alone.
"""
WIDE_V = ListScheduling(2.5, alternating=True)
"""Further rule for every grain of V placements: with it a coarser grain may be the best than with the others. Hanayo's order,
whose window is as wide, was faster on random batches before.
"""
NARROWEST = ListScheduling(1, alternating=True)
NARROW_LISTED: tuple[OrderRule, ...] = (ListScheduling(1.5, alternating=True), NARROWEST)
"""Further rules for grains that no other rule fits; the first also for grains that are nearly the best. Other papers' orders
with narrow windows (V-Min) were faster on random batches before.
"""
SPLIT_LIST_SCHEDULES: tuple[OrderRule, ...] = (
    ListScheduling(1.25, alternating=True, waiting=1),
    ListScheduling(1, waiting=0.75),
    ListScheduling(0.875, alternating=True, waiting=0.75),
    ListScheduling(0.75, alternating=True, waiting=0.5),
    ListScheduling(0.625, waiting=0.5),
    ListScheduling(0.5, waiting=0.75),
)
"""Further rules where weight gradients are split off, the first for every grain."""
PATTERNS: tuple[OrderRule, ...] = (Interleaved(), Interleaved(elastic=False))
"""Further rules for every grain of looped placements."""
LOOPED_PATTERNS: tuple[OrderRule, ...] = (Spaced(),)
"""Further rules for the best grain of looped placements."""
EQUAL_SLICES: tuple[OrderRule, ...] = (ReversedSlices(),)
"""Rules for slices of equal length, and for the best grain of looped placements. Without them SlimPipe (2504.14519) was up to
2.4 % faster on 14 of 100 random batches.
"""
SPLIT_LOOPED_PATTERNS: tuple[OrderRule, ...] = (Spaced(SPLIT_UNITS), Spaced(SPLIT_UNITS, in_groups=True))
"""`LOOPED_PATTERNS` where weight gradients are split off (PipeOffload, 2503.01328)."""
V_PATTERNS: tuple[OrderRule, ...] = tuple(Block(name, minimal) for name in BLOCKS for minimal in (False, True))
"""Further rules for V placements with two stages per rank."""
SPLIT_V_PATTERNS: tuple[OrderRule, ...] = (Block("V-Half", squeezed=True), Block("V-Min", squeezed=True))
"""`V_PATTERNS` where weight gradients are split off."""
LEAST_LISTED: tuple[OrderRule, ...] = (ListScheduling(0),)


@dataclass(frozen=True, slots=True)
class OrderRules:
    """Order rules for a placement.

    Attributes:
        first: for every grain.
        second: for the best grain, and in lockstep for all grains when none fits.
        least: when nothing else fits, and for slices that the user fixed.
        narrow: for grains that none of the first fits, widest first; the widest also for grains that are nearly the best.
        frugal: with copies, where the best is far from what unlimited memory would give.
        capped: for the best table with its sequences in other orders, where its plan is far from its bound.
        walked: for the best table, and for finer and coarser ones until they get no better.
        equal: for tables whose slices have equal length, in multiples of the ranks.
    """

    first: tuple[OrderRule, ...]
    second: tuple[OrderRule, ...]
    least: tuple[OrderRule, ...]
    frugal: tuple[OrderRule, ...]
    capped: tuple[OrderRule, ...] = ()
    narrow: tuple[OrderRule, ...] = ()
    walked: tuple[OrderRule, ...] = ()
    equal: tuple[OrderRule, ...] = ()


ONE_STAGE_PER_RANK = OrderRules(FIRST, (*SECOND, HALF), LEAST, (*SECOND, HALF, *LEAST), CAPPED)


def rules_for(problem: Problem, split: bool = False, shards: bool = False) -> OrderRules:
    """Return the rules for the problem's placement.

    Args:
        problem: the pipeline.
        split: weight gradients are split off.
        shards: the vocabulary is in shards over the ranks, whose barrier takes further chunks alive to hide.
    """
    rules = _rules_for(problem, split)
    if not shards:
        return rules
    return OrderRules(
        first=tuple(map(_with_slack, rules.first)),
        second=tuple(dict.fromkeys((*map(_with_slack, rules.second), *rules.first))),
        least=rules.least,
        frugal=tuple(map(_with_slack, rules.frugal)),
        capped=tuple(map(_with_slack, rules.capped)),
        narrow=tuple(map(_with_slack, rules.narrow)),
        walked=rules.walked,
        equal=rules.equal,
    )


def _with_slack(rule: OrderRule) -> OrderRule:
    return replace(rule, slack=1) if isinstance(rule, (WarmUp, CappedWarmUp, ListScheduling)) else rule


def _rules_for(problem: Problem, split: bool) -> OrderRules:
    if problem.has_one_stage_per_rank:
        return ONE_STAGE_PER_RANK
    more = SPLIT_LIST_SCHEDULES if split else ()
    further: tuple[OrderRule, ...] = ()
    walked: tuple[OrderRule, ...] = ()
    if is_v(problem):
        further, walked = (*V_PATTERNS, *(SPLIT_V_PATTERNS if split else ()), UnitTimes()), (*V_PATTERNS, NARROWEST)
    elif is_looped(problem):
        walked = SPLIT_LOOPED_PATTERNS if split else LOOPED_PATTERNS
        further = (*EQUAL_SLICES, *LOOPED_PATTERNS, *(SPLIT_LOOPED_PATTERNS if split else ()))
    return OrderRules(
        first=(*LIST_SCHEDULES[:2], *(PATTERNS if is_looped(problem) else (WIDE_V,)), *more[:1]),
        second=(*more[1:], *further, *LIST_SCHEDULES[2:]),
        least=LEAST_LISTED,
        frugal=ROOMY_LISTED[1:],
        narrow=NARROW_LISTED,
        walked=walked,
        equal=EQUAL_SLICES if is_looped(problem) else (),
    )
