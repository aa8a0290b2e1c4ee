"""Training with planners that do not repeat: one rank plans for all, and what is trained is the same to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.mcore.forked import job
from tests.support.mcore.jobs.planners import ITERATIONS, PLANNERS
from tests.support.mcore.synthetic_documents import documents_of, write_pair

LENGTHS = (180, 12, 60, 33, 7, 90, 25, 140)
"""Six of them train, so every batch has the same lengths in another order."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planners")
    data = write_pair(folder / "documents", documents_of(LENGTHS, vocab_size=255))
    finished = job(2, "planners", data=data, folder=folder, timeout_s=400)
    assert finished.returncode == 0, finished.output[-5000:]
    return folder


def lines_of(reports: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (reports / name / "iterations.jsonl").read_text().splitlines()]


def test_the_training_is_the_same(reports: Path) -> None:
    losses, expected = ([line["loss"] for line in lines_of(reports, which)] for which in ("budget", "greedy"))
    assert len(losses) == ITERATIONS
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", PLANNERS)
def test_every_iteration_says_how_long_it_was_planned(reports: Path, name: str) -> None:
    assert all(line["planning_us"] > 0 for line in lines_of(reports, name))


@pytest.mark.parametrize("name", PLANNERS)
def test_planning_ends_with_training(reports: Path, name: str) -> None:
    assert [(reports / name / f"left{rank}").read_text() for rank in range(2)] == ["", ""]


def test_what_the_budget_is_spent_on_is_never_slower(reports: Path) -> None:
    spans = ([line["makespan_us"]["planned"] for line in lines_of(reports, name)] for name in PLANNERS)
    assert all(ours <= theirs * (1 + 1e-9) for theirs, ours in zip(*spans, strict=True))
