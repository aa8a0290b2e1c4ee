"""Local search: how many steps it takes unasked, and that more of them are not wasted on short iterations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.planner import Options
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.local_search import LONG_STEPS, RUNS, SHARE, SMALL, STEP_US, improve, runs_of, searches
from megatron_epp.planner.orders.completion import with_split_weights
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import greedy
from megatron_epp.planner.search import search
from scripts.bench.exact.small import drawn
from tests.support.plan.planner_cases import GIB, pipeline, problem

GIVEN, COSTS, OPTIONS = problem((9000, 8000, 3000, 2500), 3, 9 * GIB), pipeline(3, 2), Options(slices=1)


def fastest(given, costs, options) -> Decisions:
    """The fastest that the search finds, before local search, with whole backwards."""
    return search(Replicas((given,), costs, options)).best().whole[0]


def test_the_search_runs_unasked_for_small_plans_without_a_budget():
    assert searches(Options(), SMALL)
    assert not searches(Options(), SMALL + 1)
    assert not searches(Options(budget_ms=0), SMALL)
    assert searches(Options(steps=1, budget_ms=0), SMALL + 1)


def test_a_long_iteration_gets_the_long_search_which_takes_a_small_share_of_it():
    shortest_us = LONG_STEPS * STEP_US / SHARE
    assert runs_of(Options(), shortest_us) == (LONG_STEPS,)
    assert runs_of(Options(), 0.99 * shortest_us) == RUNS
    assert sum(RUNS) < LONG_STEPS
    assert runs_of(Options(steps=7), shortest_us) == (7,)


def test_equal_arguments_take_equal_steps():
    start = fastest(GIVEN, COSTS, OPTIONS)
    tables = start.tables(GIVEN, COSTS)
    assert improve(start, tables, GIVEN, OPTIONS) == improve(start, tables, GIVEN, replace(OPTIONS))


def test_steps_are_judged_with_weight_gradients_split_off_where_that_is_asked_for():
    given, costs, options = drawn(108)
    start = fastest(given, costs, options)
    tables = start.tables(given, costs)
    whole, split = (improve(start, tables, given, options, split_weight=asked) for asked in (False, True))

    def split_us(made: Decisions) -> float:
        return with_split_weights(made.order, tables, made.as_offload, given.cap_bytes)[1]

    assert split_us(split) < min(split_us(start), split_us(whole))
    assert split.makespan_us(given, costs) >= whole.makespan_us(given, costs)


def test_a_plan_of_few_chunks_is_searched_with_weight_gradients_split_off_unasked(monkeypatch: pytest.MonkeyPatch):
    """The plan has 12 actions of forward and backward; the exact planner proves that none takes less time."""
    given, costs, options = drawn(104)
    given = replace(given, cap_bytes=(30_000_000_000,) * given.num_ranks)
    made = greedy(given, costs, options)
    assert len(made.chunks) * given.num_stages <= SMALL
    assert made.makespan_us(given, costs) == pytest.approx(211_727, abs=1)
    monkeypatch.setattr("megatron_epp.planner.local_search.SMALL", 0)
    assert greedy(given, costs, options).makespan_us(given, costs) > 1.05 * made.makespan_us(given, costs)
