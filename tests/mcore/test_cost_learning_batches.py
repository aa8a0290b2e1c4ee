"""Batches planned ahead change to learnt costs at a fixed number, whatever the order in which planning and training proceed."""

import threading
from argparse import Namespace
from functools import partial
from typing import Any, Self

import pytest
import torch.distributed as dist

from megatron_epp.cost.learning import RECORDED, WARM_UP
from megatron_epp.mcore.iteration import base_run
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.learn_costs import CostLearning, LearntPlanner
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.planner import Problem, plan
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
FORMULAS = analytic_costs(SHAPE, CPU, [2, 2])
PROBLEM = Problem((900, 200, 50), (0, 1), (UNLIMITED_BYTES,) * 2)
PLAN = plan(PROBLEM, FORMULAS)
LEARNING = WARM_UP + RECORDED


class Planner:
    """Stands for a `BackgroundPlanner`."""

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
    monkeypatch.setattr(base_run, "from_each_of_job", lambda item: [item])
    ours = object.__new__(Run)
    ours.args, ours.costs, ours.learnt_with = Namespace(save=None), FORMULAS, {}
    return CostLearning(partial(ours.fit, keeps_weights=True))


def test_training_waits_for_the_times_of_the_last_measured_iteration_only(made: CostLearning) -> None:
    have_come = threading.Event()

    class Late(Times):
        def events(self) -> tuple[Any, ...]:
            assert have_come.wait(30)
            return super().events()

    for _ in range(WARM_UP):
        assert made.after(PLAN, Times()) is None  # type: ignore[arg-type]
    assert made.after(PLAN, Late()) is None  # type: ignore[arg-type]
    have_come.set()
    for _ in range(RECORDED - 2):
        assert made.after(PLAN, Times()) is None  # type: ignore[arg-type]
    assert made.after(PLAN, Times()) is not None  # type: ignore[arg-type]
    assert made.learner.recorded == RECORDED


def test_an_error_of_reading_times_is_raised_at_the_next_iteration(made: CostLearning) -> None:
    class Broken(Times):
        def events(self) -> tuple[Any, ...]:
            raise OSError("no times")

    for _ in range(WARM_UP):
        made.after(PLAN, Times())  # type: ignore[arg-type]
    made.after(PLAN, Broken())  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no times"):
        made.after(PLAN, Times())  # type: ignore[arg-type]


@pytest.mark.parametrize("is_early", [False, True])
def test_the_first_batch_by_learnt_costs_is_the_same_whenever_they_come(is_early: bool) -> None:
    planner = LearntPlanner(lookahead=2)
    by_formula, by_learnt, used = Planner(), Planner(), []

    def plan_ahead() -> None:
        used.extend(planner.plan_next(by_formula, PROBLEM) for _ in range(planner.first_batch + 2))  # type: ignore[arg-type]

    thread = threading.Thread(target=plan_ahead, daemon=True)
    if is_early:
        planner.plan_with(by_learnt)  # type: ignore[arg-type]
    thread.start()
    if not is_early:
        thread.join(0.2)
        assert thread.is_alive()
        planner.plan_with(by_learnt)  # type: ignore[arg-type]
    thread.join(30)
    assert used == [by_formula] * (planner.first_batch - 1) + [by_learnt] * 3
    recorded, others = by_formula.grains[WARM_UP:LEARNING], by_formula.grains[:WARM_UP] + by_formula.grains[LEARNING:]
    assert len(set(recorded)) == RECORDED  # their slices differ, so times tell tokens from pairs
    assert {*others, *by_learnt.grains} == {1.0}
    assert planner.first_batch > LEARNING  # or its plan would be needed before costs are known
    planner.close()


def test_batches_of_single_calls_never_wait_for_costs() -> None:
    planner = LearntPlanner(lookahead=2)
    by_formula, by_learnt = Planner(), Planner()
    ahead = [planner.of_next(by_formula) for _ in range(planner.first_batch + 2)]  # type: ignore[arg-type]
    planner.plan_with(by_learnt)  # type: ignore[arg-type]
    assert {plan(PROBLEM) for plan in ahead[::-1]} == {by_formula}  # in any order, also behind the learning
    assert planner.of_next(by_formula)(PROBLEM) is by_learnt  # type: ignore[arg-type, comparison-overlap]


def test_a_thread_that_waits_ends_with_training() -> None:
    planner = LearntPlanner(lookahead=2)
    errors: list[EppError] = []

    def plan_ahead() -> None:
        try:
            while True:
                planner.plan_next(Planner(), PROBLEM)  # type: ignore[arg-type]
        except EppError as error:
            errors.append(error)

    thread = threading.Thread(target=plan_ahead, daemon=True)
    thread.start()
    planner.close()
    thread.join(30)
    assert "training has ended" in str(errors[0])
