"""Training with planners that do not repeat: one rank plans for all, and what is trained is the same to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.plan import Op
from megatron_epp.plan.serialize import load
from tests.support.mcore.forked import launch
from tests.support.mcore.planners_worker import ITERATIONS, PLANNERS
from tests.support.mcore.synthetic_documents import documents_of, write_pair

WORKER = "tests.support.mcore.planners_worker"
LENGTHS = (180, 12, 60, 33, 7, 90, 25, 140)
"""Six of them train, so every batch has the same lengths in another order."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planners")
    data = write_pair(folder / "documents", documents_of(LENGTHS, vocab_size=255))
    finished = launch(2, "-m", WORKER, env={"DATA": data, "REPORTS": str(folder)}, timeout_s=400)
    assert finished.returncode == 0, finished.output[-5000:]
    return folder


def lines_of(reports: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (reports / name / "iterations.jsonl").read_text().splitlines()]


def test_replicas_that_share_experts_train_the_same_with_refined_plans(tmp_path: Path) -> None:
    """Both replicas have the same lengths in every batch, in another order: the solver's plans are run once they are there."""
    data = write_pair(tmp_path / "documents", documents_of(LENGTHS, vocab_size=255))
    finished = launch(4, "-m", WORKER, env={"DATA": data, "REPORTS": str(tmp_path), "EXPERTS": "1"}, timeout_s=400)
    assert finished.returncode == 0, finished.output[-5000:]
    losses, expected = ([line["loss"] for line in lines_of(tmp_path, name)] for name in ("milp", "greedy"))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["milp", "budget", "milp with shards"])
def test_the_training_is_the_same(reports: Path, name: str) -> None:
    losses, expected = ([line["loss"] for line in lines_of(reports, which)] for which in (name, "greedy"))
    assert len(losses) == ITERATIONS
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_iteration_says_how_long_it_was_planned(reports: Path, name: str) -> None:
    assert all(line["planning_us"] > 0 for line in lines_of(reports, name))


def test_plans_name_their_planner(reports: Path) -> None:
    assert [load(reports / name / "plan.json").planner for name in PLANNERS] == ["greedy", "milp", "greedy", "milp"]


def test_the_solver_plans_shards_of_the_vocabulary_where_they_are_asked_for(reports: Path) -> None:
    found = {name: {step.action.op for row in load(reports / name / "plan.json").ranks for step in row} for name in PLANNERS}
    assert [name for name in PLANNERS if Op.S in found[name]] == ["milp with shards"]


def test_what_the_solver_found_is_never_slower(reports: Path) -> None:
    spans = {name: [line["makespan_us"]["planned"] for line in lines_of(reports, name)] for name in PLANNERS}
    for name in ("milp", "budget"):
        assert all(ours <= theirs * (1 + 1e-9) for ours, theirs in zip(spans[name], spans["greedy"], strict=True))


@pytest.mark.parametrize("name", PLANNERS)
def test_planning_ends_with_training(reports: Path, name: str) -> None:
    assert [(reports / name / f"left{rank}").read_text() for rank in range(2)] == ["", ""]
