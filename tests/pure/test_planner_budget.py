"""Planning against a deadline: never slower than without, it ends in time, and what was found once is kept."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.budget import FIRST_STEPS, Anytime, improved
from megatron_epp.planner.result import greedy
from megatron_epp.planner.search import Candidates
from tests.support.plan.planner_cases import GIB, pipeline, problem

LENGTHS = (9000, 8000, 3000, 2500)
GIVEN, COSTS = problem(LENGTHS, 3, 9 * GIB), pipeline(3, 2)
OPTIONS = Options(slices=1, budget_ms=1000)


def ticking(step_s: float):
    """A clock that advances by as much whenever it is read."""
    ticks = itertools.count()
    return lambda: next(ticks) * step_s


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every run of the local search from here on."""
    from megatron_epp.planner import budget as anytime

    runs: list[int] = []
    improve = anytime.improve

    def counted(made, tables, problem, options):
        runs.append(options.steps)
        return improve(made, tables, problem, options)

    monkeypatch.setattr(anytime, "improve", counted)
    return runs


def tries(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as candidates were ordered from here on."""
    tried: list[int] = []
    order = Candidates._order
    monkeypatch.setattr(Candidates, "_order", lambda self, *rest: tried.append(1) or order(self, *rest))
    return tried


def test_more_time_is_never_slower():
    untouched = replace(OPTIONS, budget_ms=0)
    spans = [plan(GIVEN, COSTS, untouched).predicted.makespan_us]
    for step_s in (0.9, 0.3, 0.15):  # of a second's budget, so more and more runs
        made = Anytime(COSTS, OPTIONS, ticking(step_s)).plan(GIVEN)
        assert check(made) == []
        spans.append(made.predicted.makespan_us)
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] < spans[0]


def test_even_no_time_at_all_is_never_slower_than_no_budget():
    without = plan(GIVEN, COSTS, replace(OPTIONS, budget_ms=None))
    assert Anytime(COSTS, OPTIONS, ticking(9)).plan(GIVEN).predicted.makespan_us <= without.predicted.makespan_us


def test_it_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    start = greedy(GIVEN, COSTS, replace(OPTIONS, budget_ms=0))
    improved(start, GIVEN, COSTS, OPTIONS, deadline_s=10, clock=ticking(3))
    # A run takes 3 s. After the one of 64 steps 4 s are left, which is time for 85; after that 1 s, for 28; then none.
    assert runs == [FIRST_STEPS, 2 * FIRST_STEPS, 85, 28]
    runs.clear()
    assert improved(start, GIVEN, COSTS, OPTIONS, deadline_s=0, clock=ticking(1)) == start
    assert runs == []


def test_what_cannot_be_improved_does_not_take_its_time(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    evaluation = replace(GIVEN, forward_only=True)
    a_minute = Anytime(COSTS, replace(OPTIONS, budget_ms=60_000))
    assert a_minute.plan(evaluation).chunks == plan(evaluation, COSTS, Options(slices=1)).chunks
    assert sum(runs) < 10**7  # of steps that are none


def test_the_same_lengths_in_any_order_go_on_where_they_were_left(monkeypatch: pytest.MonkeyPatch):
    ours = Anytime(COSTS, OPTIONS, ticking(0.2))
    first = ours.plan(GIVEN)
    runs = runs_of(monkeypatch)
    ours.clock = lambda: 0.0 if not runs else 9.0  # one run
    shuffled = replace(GIVEN, lengths=LENGTHS[::-1])
    second = ours.plan(shuffled)
    assert second.lengths == LENGTHS[::-1]
    assert check(second) == []
    assert second.predicted.makespan_us <= first.predicted.makespan_us
    assert len(ours.solved.entries) == 1


def test_weight_gradients_are_split_off_where_asked_for():
    costs, options = pipeline(3, 2), replace(OPTIONS, split_weight=True)
    made = Anytime(costs, options, ticking(0.2)).plan(GIVEN)
    assert check(made) == []
    assert made.predicted.makespan_us <= plan(GIVEN, costs, replace(options, budget_ms=0)).predicted.makespan_us


def test_a_batch_is_searched_once_whether_or_not_weight_gradients_are_split_off(monkeypatch: pytest.MonkeyPatch):
    tried = tries(monkeypatch)
    whole, apart = (Anytime(COSTS, replace(OPTIONS, slices=None, split_weight=split), ticking(9)) for split in (False, True))
    whole.plan(GIVEN)
    once = len(tried)
    tried.clear()
    apart.plan(GIVEN)
    assert 0 < len(tried) <= 1.5 * once  # what splitting could gain lets fewer tables be passed over
    tried.clear()
    apart.plan(GIVEN)
    assert not tried


def test_what_was_found_with_weight_gradients_split_off_is_kept():
    ours = Anytime(COSTS, replace(OPTIONS, split_weight=True), ticking(0.2))
    spans = [ours.plan(GIVEN).predicted.makespan_us for _ in range(3)]
    assert spans == sorted(spans, reverse=True)


def test_what_fits_nothing_is_said_without_any_local_search(monkeypatch: pytest.MonkeyPatch):
    runs = runs_of(monkeypatch)
    with pytest.raises(InfeasibleError):
        plan(replace(GIVEN, cap_bytes=(GIB,) * 3), COSTS, replace(OPTIONS, budget_ms=60_000))
    assert runs == []
