"""The benchmark of commands: it has inputs that every command takes, and says which run takes too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_epp.cli.main import MODULES, NAMES, _parser
from scripts.bench.commands import INPUTS, Took, rows_of, took


def test_every_command_takes_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert set(INPUTS) == {*MODULES, *NAMES}
    monkeypatch.chdir(tmp_path)
    for command, inputs in INPUTS.items():
        for flags in inputs.values():
            assert _parser([command]).parse([command, *flags.split()]).run is not None


@pytest.mark.parametrize(
    ("command", "given", "cpu_s", "wall_s", "has_progress", "is_late"),
    [
        ("plan", "--help", 1.1, 0.5, False, True),
        ("plan", "small", 4.9, 5.1, False, False),
        ("plan", "large", 5.1, 4.9, False, True),
        ("plan", "large", 60.0, 60.0, True, False),
    ],
)
def test_a_run_is_late_by_its_processor_time_unless_it_shows_progress(command, given, cpu_s, wall_s, has_progress, is_late):
    one = Took(command, given, cpu_s, wall_s, has_progress, exit_code=0)
    assert one.is_late == is_late
    assert ("too long" in rows_of([one])[-1]) == is_late


def test_a_run_has_the_time_of_its_process_and_its_exit_code(tmp_path: Path):
    done, failed = took("schedules", "", "", tmp_path), took("schedules", "", "--no-such-flag", tmp_path)
    assert done.cpu_s > 0
    assert done.wall_s > 0
    assert (done.exit_code, failed.exit_code) == (0, 2)
    assert "exit code 2" in rows_of([failed])[-1]
