"""Trainings on documents and on a script's microbatches share folders, watches, failures, and the change to learnt costs."""

import threading
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.data.iterator import DisagreementError
from megatron_epp.features.learnt_costs import learn_costs
from megatron_epp.features.learnt_costs.learn_costs import CostLearning, LearntPlanner, first_batch
from megatron_epp.features.learnt_costs.learnt import with_times
from megatron_epp.launch.run_folder import LOCK
from megatron_epp.mcore.iteration import base_run
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.loggers import Reports
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.planner import Problem, plan
from megatron_epp.runtime import failures
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.watchdog import Watchdog
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs


@pytest.fixture
def ours() -> Run:
    made: Run = object.__new__(Run)
    made.rank, made.failures = 3, FailureBoard(HashStore(), 0, 2)
    return made


def test_a_run_holds_the_folders_that_it_writes_to(tmp_path: Path) -> None:
    checkpoints, reports = tmp_path / "checkpoints", tmp_path / "reports"
    name = base_run._hold_folders(Namespace(save=str(checkpoints), epp_report_dir=str(reports)))
    for folder in (checkpoints, reports):
        assert name in (folder / LOCK).read_text()
    assert base_run._hold_folders(Namespace(epp_report_dir=None)) != name  # a framework that saves by itself


def test_a_finalisation_of_gradients_that_stands_still_ends_the_run(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = threading.Event(), list[str]()
    ours.watchdog = Watchdog(0.1, lambda message: (said.append(message), ended.set()))  # type: ignore[func-returns-value, arg-type]

    def hang(models: Any, num_tokens: torch.Tensor | None, pg_collection: Any, force_all_reduce: bool) -> None:
        assert num_tokens is None
        assert pg_collection == "groups"
        assert ended.wait(60)

    config = SimpleNamespace(finalize_model_grads_func=hang, calculate_per_token_loss=False)
    monkeypatch.setattr(base_run, "get_model_config", lambda model: config)
    ours.finish_gradients([torch.nn.Module()], torch.ones(()), "groups", False)
    assert said == ["rank 3 waits for gradient finalisation (wait_limit_seconds)"]
    config.finalize_model_grads_func = None
    ours.finish_gradients([torch.nn.Module()], torch.ones(()), None, False)


def test_a_rank_that_fails_tells_why_unless_all_fail_alike(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "PATIENCE_S", 0.0)
    other = FailureBoard(ours.failures._store, 1, 2)
    with pytest.raises(EppError, match="no plan fits"), ours.telling_others(unless=EppError):
        raise EppError("no plan fits")
    assert other.cause() == ""
    with pytest.raises(OSError, match="no such file"), ours.telling_others(unless=EppError):
        raise OSError("no such file")
    assert other.cause() == "rank 1 ends, since rank 0 failed: OSError: no such file"


def test_ranks_are_told_of_a_disagreement_that_only_some_have_seen(ours: Run) -> None:
    with pytest.raises(DisagreementError), ours.telling_others(unless=EppError):
        raise DisagreementError("replicas divide a batch differently")
    assert "replicas divide a batch differently" in FailureBoard(ours.failures._store, 1, 2).cause()


def test_the_last_lines_of_every_run_are_written_before_writers_close(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written, other = list[str](), object.__new__(Run)
    for number, one in enumerate((ours, other)):
        one.reports = Reports()
        one.reports.begin(lambda number=number: partial(written.append, f"line of {number}"))  # type: ignore[misc]
    monkeypatch.setattr(base_run, "_runs", {ours, other})
    base_run.complete_reports()
    assert sorted(written) == ["line of 0", "line of 1"]


def test_an_error_that_follows_from_anothers_gives_that_one(ours: Run) -> None:
    FailureBoard(ours.failures._store, 1, 2)._store.set("failed", "rank 1 failed: no image")
    with pytest.raises(EppError, match="rank 0 ends, since rank 1 failed: no image"), ours.telling_others():
        raise RuntimeError("connection closed")


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
    recorded, others = by_formula.grains[WARM_UP:LEARNING], by_formula.grains[: WARM_UP - 1] + by_formula.grains[LEARNING:]
    assert by_formula.grains[WARM_UP - 1] == min(recorded)  # so memory of the largest chunks is there
    assert len(set(recorded)) == RECORDED  # their slices differ, so times tell tokens from pairs
    assert {*others, *by_learnt.grains} == {1.0}
    assert first > LEARNING  # or its plan would be needed before costs are known
    planner.close()


def test_a_resumed_run_has_the_times_of_copies_that_an_earlier_one_learnt() -> None:
    earlier = replace(FORMULAS, copy_us_per_byte=7.0, host_us_per_byte=2.0)
    resumed = with_times(FORMULAS, earlier)
    assert (resumed.copy_us_per_byte, resumed.host_us_per_byte) == (7.0, 2.0)


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
