"""Planning against a deadline: never slower than without, and it ends in time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.result import greedy, improved_until, plan_within_budget
from tests.support.plan.planner_cases import GIB, pipeline, problem

LENGTHS = (9000, 8000, 3000, 2500)
GIVEN, COSTS = problem(LENGTHS, 3, 9 * GIB), pipeline(3, 2)
OPTIONS = Options(slices=1, budget_ms=1000)


def ticking(step_s: float):
    """A clock that advances by as much whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def test_more_time_is_never_slower():
    untouched = replace(OPTIONS, budget_ms=0)
    spans = [plan(GIVEN, COSTS, untouched).predicted.makespan_us]
    for step_s in (0.9, 0.3, 0.15):  # of a second's budget, so more and more runs
        made = plan_within_budget(GIVEN, COSTS, OPTIONS, ticking(step_s))
        assert check(made) == []
        spans.append(made.predicted.makespan_us)
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


def test_even_no_time_at_all_is_never_slower_than_no_budget():
    without = plan(GIVEN, COSTS, replace(OPTIONS, budget_ms=None))
    assert plan_within_budget(GIVEN, COSTS, OPTIONS, ticking(9)).predicted.makespan_us <= without.predicted.makespan_us


@pytest.mark.parametrize(("deadline_s", "tick_s"), [(0, 1), (10, 3), (100, 0.7)])
def test_it_ends_at_the_deadline(deadline_s: float, tick_s: float):
    start, clock = greedy(GIVEN, COSTS, replace(OPTIONS, budget_ms=0)), ticking(tick_s)
    made = improved_until(start, GIVEN, COSTS, OPTIONS, deadline_s, clock)
    assert clock() <= deadline_s + 2 * tick_s
    assert deadline_s or made == start
