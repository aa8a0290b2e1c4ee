"""Trainings that are interrupted at random moments end, leave nothing behind and go on from their checkpoints to the bit."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.mcore import interruptions


def test_thirty_trials_have_every_happening_and_moments_inside_a_save() -> None:
    trials = [interruptions.trial_of(seed) for seed in range(30)]
    assert {trial.happening for trial in trials} == set(interruptions.HAPPENINGS)
    assert {trial.ranks for trial in trials} == {2, 4}
    assert {trial.in_save for trial in trials} == {False, True}


@pytest.mark.slow  # minutes; `test_resume.py` and `test_killed.py` have one moment each
def test_no_trial_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    monkeypatch.setattr(sys, "argv", ["interruptions", "0", "30", "--log", str(log)])
    interruptions.main()
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(found) == 30
    assert [line for line in found if line["faults"]] == []
