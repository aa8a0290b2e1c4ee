"""Local search: steps that gain, equal ones for equal arguments, and against a deadline more in more time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.local_search import SMALL_PLAN_ITEMS, improve
from megatron_epp.planner.orders.completion import with_split_weights
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import greedy, improved_until, plan_within_budget
from megatron_epp.planner.search import search
from scripts.bench.small_cases import drawn
from tests.support.plan.planner_cases import GIB, pipeline, problem

GIVEN, COSTS, OPTIONS = problem((9000, 8000, 3000, 2500), 3, 9 * GIB), pipeline(3, 2), Options(slices=1)


def fastest(given, costs, options) -> Decisions:
    """The fastest that the search finds, before local search, with whole backwards."""
    return search(Replicas((given,), costs, options)).best().whole_backwards[0]


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
    given = replace(given, cap_bytes=(30_200_000_000,) * given.num_ranks)
    made = greedy(given, costs, options)
    assert len(made.chunks) * given.num_stages <= SMALL_PLAN_ITEMS
    assert made.makespan_us(given, costs) == pytest.approx(211_727, abs=1)
    monkeypatch.setattr("megatron_epp.planner.local_search.SMALL_PLAN_ITEMS", 0)
    assert greedy(given, costs, options).makespan_us(given, costs) > 1.05 * made.makespan_us(given, costs)


BUDGET = replace(OPTIONS, budget_ms=1000)


def ticking(step_s: float):
    """A clock that advances by as much whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def test_more_time_is_never_slower():
    untouched = replace(BUDGET, budget_ms=0)
    spans = [plan(GIVEN, COSTS, untouched).predicted.makespan_us]
    for step_s in (0.9, 0.3, 0.15):  # of a second's budget, so more and more runs
        made = plan_within_budget(GIVEN, COSTS, BUDGET, ticking(step_s))
        assert check(made) == []
        spans.append(made.predicted.makespan_us)
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


def test_even_no_time_at_all_is_never_slower_than_no_budget():
    without = plan(GIVEN, COSTS, replace(BUDGET, budget_ms=None))
    assert plan_within_budget(GIVEN, COSTS, BUDGET, ticking(9)).predicted.makespan_us <= without.predicted.makespan_us


@pytest.mark.parametrize(("deadline_s", "tick_s"), [(0, 1), (10, 3), (100, 0.7)])
def test_it_ends_at_the_deadline(deadline_s: float, tick_s: float):
    start, clock = greedy(GIVEN, COSTS, replace(BUDGET, budget_ms=0)), ticking(tick_s)
    made = improved_until(start, GIVEN, COSTS, BUDGET, deadline_s, clock)
    assert clock() <= deadline_s + 2 * tick_s
    assert deadline_s or made == start
