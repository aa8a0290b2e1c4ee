"""Local search: how many steps it takes unasked, and that more of them are not wasted on short iterations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.planner import Options
from megatron_epp.planner.search import local
from megatron_epp.planner.search.greedy import candidates, predicted_us
from megatron_epp.planner.search.local import LONG_STEPS, RUNS, SHARE, SMALL, STEP_US, improve, runs_of, searches
from tests.support.plan.planner_cases import GIB, pipeline, problem

GIVEN, COSTS, OPTIONS = problem((9000, 8000, 3000, 2500), 3, 9 * GIB), pipeline(3, 2), Options(slices=1)


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every run of the search from here on."""
    taken: list[int] = []
    search = local.search

    def counted(*args):
        taken.append(args[6])
        return search(*args)

    monkeypatch.setattr(local, "search", counted)
    return taken


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


def test_runs_go_on_from_the_best_while_they_gain(monkeypatch: pytest.MonkeyPatch):
    (start,) = candidates(GIVEN, COSTS, OPTIONS).best
    tables, taken = start.tables(GIVEN, COSTS), steps_taken(monkeypatch)
    better = improve(start, tables, GIVEN, OPTIONS)
    assert predicted_us(better, GIVEN, COSTS) < predicted_us(start, GIVEN, COSTS)
    assert taken == [*RUNS]
    taken.clear()
    assert predicted_us(improve(better, tables, GIVEN, OPTIONS), GIVEN, COSTS) <= predicted_us(better, GIVEN, COSTS)
    assert taken == [RUNS[0]]


def test_equal_arguments_take_equal_steps():
    (start,) = candidates(GIVEN, COSTS, OPTIONS).best
    tables = start.tables(GIVEN, COSTS)
    assert improve(start, tables, GIVEN, OPTIONS) == improve(start, tables, GIVEN, replace(OPTIONS))
