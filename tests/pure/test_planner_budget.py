"""Planning against a deadline: never slower than without, and it ends in time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.result import FIRST_STEPS, greedy, improved_until, plan_within_budget
from tests.support.plan.planner_cases import GIB, pipeline, problem

LENGTHS = (9000, 8000, 3000, 2500)
GIVEN, COSTS = problem(LENGTHS, 3, 9 * GIB), pipeline(3, 2)
OPTIONS = Options(slices=1, budget_ms=1000)


def ticking(step_s: float):
    """A clock that advances by as much whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every run of the local search against a deadline from here on."""
    from megatron_epp.planner import result as anytime

    runs: list[int] = []
    improve = anytime.improve

    def counted(made, tables, problem, options, **of_candidates):
        if not of_candidates:  # candidates of a search are improved without a deadline
            runs.append(options.steps)
        return improve(made, tables, problem, options, **of_candidates)

    monkeypatch.setattr(anytime, "improve", counted)
    return runs


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


def test_it_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    start = greedy(GIVEN, COSTS, replace(OPTIONS, budget_ms=0))
    improved_until(start, GIVEN, COSTS, OPTIONS, deadline_s=10, clock=ticking(3))
    # A run takes 3 s. After the one of 64 steps 4 s are left, which is time for 85; after that 1 s, for 28; then none.
    assert runs == [FIRST_STEPS, 2 * FIRST_STEPS, 85, 28]
    runs.clear()
    assert improved_until(start, GIVEN, COSTS, OPTIONS, deadline_s=0, clock=ticking(1)) == start
    assert runs == []


def test_what_cannot_be_improved_does_not_take_its_time(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    evaluation = replace(GIVEN, forward_only=True)
    a_minute = replace(OPTIONS, budget_ms=60_000)
    assert plan_within_budget(evaluation, COSTS, a_minute).chunks == plan(evaluation, COSTS, Options(slices=1)).chunks
    assert sum(runs) < 10**7  # of steps that are none


def test_weight_gradients_are_split_off_where_asked_for():
    costs, options = pipeline(3, 2), replace(OPTIONS, split_weight=True)
    made = plan_within_budget(GIVEN, costs, options, ticking(0.2))
    assert check(made) == []
    assert made.predicted.makespan_us <= plan(GIVEN, costs, replace(options, budget_ms=0)).predicted.makespan_us


def test_what_fits_nothing_is_said_without_any_local_search(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    with pytest.raises(InfeasibleError):
        plan(replace(GIVEN, cap_bytes=(GIB,) * 3), COSTS, replace(OPTIONS, budget_ms=60_000))
    assert runs == []
