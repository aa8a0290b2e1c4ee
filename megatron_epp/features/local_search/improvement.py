"""Local search: small changes to finished decisions, kept when they are faster. Counted in steps, never in seconds."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np

from megatron_epp.features.local_search.steps import Facts, Spare, StepChoice, copy_choice, search
from megatron_epp.features.split_weights.split import storage
from megatron_epp.features.split_weights.split_orders import with_split_weights
from megatron_epp.features.vocabulary.vocabulary_order import SHARD_KINDS, no_storage
from megatron_epp.features.vocabulary.vocabulary_order import storage as shard_storage
from megatron_epp.plan import is_unlimited
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.candidates import Candidate, Candidates
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import copy_columns, makespan_us, room_for
from megatron_epp.planner.fit import by_stage, caps_at
from megatron_epp.planner.kernels.codes import CodedOrder, Codes, encode
from megatron_epp.planner.kernels.compiled import floats, integer_zeros, integers, is_compiled
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.completion import completed, has_added
from megatron_epp.planner.search import SMALL_PLAN_ITEMS
from megatron_epp.planner.tables import Tables

LOG = logging.getLogger(__name__)

IMPROVED_TABLES = 3
"""Chunk tables, the fastest, from whose plans local search starts."""
LONG_RUN_STEPS = 20_000
"""Steps of a search that runs unasked where they take little of the iteration."""
SHORT_RUN_STEPS = (4000, 8000)
"""Steps of successive runs for shorter iterations, which end with the first run that gains little. On 49 random cases under
tight caps 4,000 steps left makespans 0.07 % above 20,000 steps on average, at worst 1.2 %.
"""
MIN_GAIN_SHARE = 0.001
"""Relative gain of a run after which another one is not worth its time. With 0 no plan of 70 changes (see `grains`)."""
STEP_US = 5.0
"""Processor time of a step with compiled loops: 3 to 6 us on plans of 12 to 40 actions."""
LONG_RUN_SHARE = 0.05
"""Share of an iteration that the long search may take: planning shares its cores with training."""
RESTARTS = 10
"""Times the search returns to the best found. With 3 or 30 four or five plans of 70 differ, 0.5 % faster to 0.6 % slower."""
ALLOWANCE_SHARE = 0.03
"""A step may be slower than where it starts from by this share of the best at first, and by nothing before each return:
threshold accepting (Dueck and Scheuer, 1990). With 0.01 three plans of 70 differ, 0.5 % faster to 0.1 % slower; with 0.1 five
are slower, by up to 3 %.
"""


def searches(options: Options, num_items: int) -> bool:
    """Return whether the search runs on so many items, stages times chunks."""
    return num_items <= SMALL_PLAN_ITEMS if options.steps is None else options.steps > 0


def finish(candidates: Candidates, best: Candidate) -> Candidate:
    """Improve the fastest candidates of small plans; return the fastest of them and the best."""
    fitting, problem = candidates.fitting(), candidates.problem
    tables = list({id(candidate.table): candidate.table for candidate in fitting}.values())[:IMPROVED_TABLES]
    for table in tables:
        # Local search knows no copies, so the fastest without may overtake a faster one that has some.
        candidate = next((candidate for candidate in fitting if candidate.table is table and not candidate.has_copies), None)
        if candidate is not None and searches(candidates.options, problem.num_stages * len(table)):
            best = min(best, improved(candidates, candidate), key=attrgetter("key"))
    return best


def improved(candidates: Candidates, candidate: Candidate) -> Candidate:
    """Improve a candidate of one replica, without copies."""
    whole, tables = candidate.whole_backwards[0], candidates.tables_and_bound(candidate.table, candidate.recipe)[0]
    moved = improve(whole, tables[0], candidates.problem, candidates.options, split_weight=candidates.splits)
    took_us = makespan_us(moved.order, tables[0], moved.recompute_steps)
    return candidates.complete(candidate, (moved,), tables, took_us, [moved.as_offload], candidates.splits)


def runs_of(options: Options, makespan_us: float) -> tuple[int, ...]:
    """Return the steps of the search's runs; each run begins with the best found before it.

    Unasked, they follow from the predicted makespan and not from a clock, so equal problems get equal plans on every machine.
    """
    if options.steps is not None:
        return (options.steps,)
    is_long = LONG_RUN_SHARE * makespan_us >= LONG_RUN_STEPS * STEP_US
    return (LONG_RUN_STEPS,) if is_long else SHORT_RUN_STEPS


def improve(decisions: Decisions, tables: Tables, problem: Problem, options: Options, split_weight: bool = False) -> Decisions:
    """Take steps of local search from decisions that fit the caps; return whole backwards. Equal arguments take equal steps.

    A step changes one thing: an action of one rank moves past its neighbours, two neighbouring backwards (or forwards, or both)
    of different sequences trade places on all ranks, or the recompute of one chunk of one stage gets another limit. Recompute
    is fitted again on the ranks concerned. A slower step is taken too, less and less so (threshold accepting). With
    `split_weight`, weight gradients are split off to judge it where that is faster.
    """
    asked = searches(options, problem.num_stages * len(decisions.chunks))
    if not asked or decisions.copies or problem.forward_only or options.recompute != "auto":
        return decisions
    if decisions.kv_offload and not is_unlimited(problem.host_cap_bytes):  # steps count no host memory
        return decisions
    _say_if_slow()
    bound_us = lower_bound_us(tables, decisions.chunks, problem, replace(options, offload=False, split_weight=split_weight))
    columns = tables.columns
    codes = encode(decisions.order, columns.num_chunks)
    split = with_split_weights if split_weight else None
    _, start_us = completed(decisions.order, tables, decisions.as_offload, problem.cap_bytes, split)
    recompute_steps = list(chain.from_iterable(decisions.recompute_steps))
    now, best, trial = (
        StepChoice(integers(codes.actions), integers(recompute_steps), integers(columns.most)) for _ in range(3)
    )
    facts = _facts(decisions, tables, problem, codes, trial, split_weight)
    items = len(recompute_steps)
    spare = Spare(
        numbers=integers([options.seed]),
        leaves=integer_zeros(items),
        seen=integers([-1] * (2 * items)),
        took_us=floats(columns.action_us),
    )
    limit_us, room, took_us = bound_us * (1 + 1e-9), room_for(codes, columns), start_us
    for steps in runs_of(options, start_us):
        before_us, period = took_us, max(1, steps // RESTARTS)
        allowance_us = ALLOWANCE_SHARE * before_us
        took_us = search(now, best, trial, facts, room, spare, steps, period, before_us, limit_us, allowance_us)
        if took_us > before_us * (1 - MIN_GAIN_SHARE):
            break
        copy_choice(best, now)
    order = CodedOrder(Codes(best.actions, codes.starts), columns.num_chunks)
    return replace(decisions, order=order, recompute_steps=by_stage(best.recompute_steps, columns.num_chunks))


@cache
def _say_if_slow() -> None:
    if not is_compiled():
        LOG.info("planning runs in plain Python; pip install 'megatron-epp[fast]' makes its search about ten times faster")


def _facts(
    decisions: Decisions, tables: Tables, problem: Problem, codes: Codes, trial: StepChoice, split_weight: bool
) -> Facts:
    columns, chunks = tables.columns, tables.columns.num_chunks
    groups = slice_groups(decisions.chunks, problem.loss_groups)
    rows = [[stage * chunks + c for stage in stages for c in range(chunks)] for stages in tables.stages_of]
    small_rows = (row if len(row) <= SMALL_PLAN_ITEMS else [] for row in rows)
    dear = [sorted(row, key=lambda item: (-columns.dear_us[item], item)) for row in small_rows]
    whole, filled = storage(trial.actions, codes.starts, columns)
    sharded, most = has_added(tables), 2 * np.diff(codes.starts)
    return Facts(
        starts=codes.starts,
        columns=columns,
        group_of=integers(number for number, group in enumerate(groups) for _ in group),
        caps=integers(problem.cap_bytes),
        caps_at=caps_at(codes, problem.cap_bytes),
        dear=integers(chain.from_iterable(dear)),
        dear_starts=integers(accumulate(map(len, dear), initial=0)),
        no_split=integer_zeros(columns.num_stages * chunks),
        copies=copy_columns((), chunks, 0),
        splits=int(split_weight),
        whole=whole,
        filled=filled,
        away=integers([]),
        full=tables.columns_with(SHARD_KINDS) if sharded else columns,
        shards=shard_storage(tables, most.tolist()) if sharded else no_storage(),
    )
