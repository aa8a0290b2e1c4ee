"""Batches planned ahead change to learnt costs at a fixed number, whatever the order in which planning and training proceed."""

import threading
from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch.distributed as dist

from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.features.learnt_costs import learn_costs
from megatron_epp.features.learnt_costs.learn_costs import CostLearning, LearntPlanner, first_batch
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.planner import Problem, plan
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
FORMULAS = analytic_costs(SHAPE, CPU, [2, 2])
PROBLEM = Problem((900, 200, 50), (0, 1), (UNLIMITED_BYTES,) * 2)
PLAN = plan(PROBLEM, FORMULAS)
LEARNING = WARM_UP + RECORDED


class Planner:
    def __init__(self) -> None:
        self.grains = list[float]()

    def plan(self, problem: Problem, grain: float = 1.0) -> Self:
        self.grains.append(grain)
        return self


class Times:
    """Recorder of a rank whose actions took twice their planned time."""

    def events(self) -> tuple[Any, ...]:
        return tuple((str(step.action), 0.0, 2.0 * step.time_us, None) for row in PLAN.ranks for step in row)

    def collectives(self) -> tuple[Any, ...]:
        return ()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> CostLearning:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: None)
    monkeypatch.setattr(learn_costs, "from_each_of_job", lambda item: [item])
    run = SimpleNamespace(args=Namespace(save=None, epp_lookahead=2), costs=FORMULAS, makes_chunks=True)
    run.links, run.completed, run.plan_by = SimpleNamespace(ranks=[0]), lambda costs: costs, partial(setattr, run, "costs")
    return CostLearning(run)  # type: ignore[arg-type]


def test_training_waits_for_the_times_of_the_last_measured_iteration_only(made: CostLearning) -> None:
    have_come = threading.Event()

    class Late(Times):
        def events(self) -> tuple[Any, ...]:
            assert have_come.wait(30)
            return super().events()

    for _ in range(WARM_UP):
        made.after(PLAN, Times(), dict)  # type: ignore[arg-type]
    made.after(PLAN, Late(), dict)  # type: ignore[arg-type]
    have_come.set()
    for _ in range(RECORDED - 2):
        made.after(PLAN, Times(), dict)  # type: ignore[arg-type]
    assert made.saved is None
    made.after(PLAN, Times(), dict)  # type: ignore[arg-type]
    assert made.saved is not None
    assert made._run.costs is made.saved.costs
    assert made.learner.seen == WARM_UP + RECORDED


def test_an_error_of_reading_times_is_raised_at_the_next_iteration(made: CostLearning) -> None:
    class Broken(Times):
        def events(self) -> tuple[Any, ...]:
            raise OSError("no times")

    for _ in range(WARM_UP):
        made.after(PLAN, Times(), dict)  # type: ignore[arg-type]
    made.after(PLAN, Broken(), dict)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no times"):
        made.after(PLAN, Times(), dict)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_batch_by_learnt_costs_is_the_same_whenever_they_come(is_early: bool) -> None:
    by_formula, by_learnt, used, first = Planner(), Planner(), [], first_batch(lookahead=2)
    planner = LearntPlanner(by_formula, lookahead=2)  # type: ignore[arg-type]

    def plan_ahead() -> None:
        used.extend(planner.plan(PROBLEM) for _ in range(first + 2))

    thread = threading.Thread(target=plan_ahead, daemon=True)
    if is_early:
        planner.plan_with(by_learnt)  # type: ignore[arg-type]
    thread.start()
    if not is_early:
        thread.join(0.2)
        assert thread.is_alive()
        planner.plan_with(by_learnt)  # type: ignore[arg-type]
    thread.join(30)
    assert used == [by_formula] * (first - 1) + [by_learnt] * 3
    recorded, others = by_formula.grains[WARM_UP:LEARNING], by_formula.grains[:WARM_UP] + by_formula.grains[LEARNING:]
    assert len(set(recorded)) == RECORDED  # their slices differ, so times tell tokens from pairs
    assert {*others, *by_learnt.grains} == {1.0}
    assert first > LEARNING  # or its plan would be needed before costs are known
    planner.close()


def test_batches_of_single_calls_never_wait_for_costs() -> None:
    by_formula, by_learnt = Planner(), Planner()
    planner = LearntPlanner(by_formula, lookahead=2)  # type: ignore[arg-type]
    ahead = [planner.of_next() for _ in range(first_batch(lookahead=2) + 2)]
    planner.plan_with(by_learnt)  # type: ignore[arg-type]
    assert {plan(PROBLEM) for plan in ahead[::-1]} == {by_formula}  # in any order, also behind the learning
    assert planner.of_next()(PROBLEM) is by_learnt  # type: ignore[comparison-overlap]


def test_a_thread_that_waits_ends_with_training() -> None:
    planner = LearntPlanner(Planner(), lookahead=2)  # type: ignore[arg-type]
    errors: list[EppError] = []

    def plan_ahead() -> None:
        try:
            while True:
                planner.plan(PROBLEM)
        except EppError as error:
            errors.append(error)

    thread = threading.Thread(target=plan_ahead, daemon=True)
    thread.start()
    planner.close()
    thread.join(30)
    assert "training has ended" in str(errors[0])
