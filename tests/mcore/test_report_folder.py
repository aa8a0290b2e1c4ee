"""Reports of a run are diagnostics: where they cannot be written, it is said once and training goes on."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest

from megatron_epp.mcore.iteration.report_folder import LINES, ReportFolder
from tests.support.failing_disk import swept
from tests.support.plan.report_plans import measured_run, sliced_plan


def written(folder: ReportFolder, iterations: range) -> None:
    made = sliced_plan(num_ranks=2, slices=2, batched=1)
    for iteration in iterations:
        folder.write(iteration, {"iteration": iteration}, made, measured_run(made))


def test_every_iteration_is_a_line_and_those_asked_for_are_traced(tmp_path: Path):
    written(ReportFolder(tmp_path / "report", "0123abcd", (2, 3)), range(1, 5))
    lines = (tmp_path / "report" / LINES).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4]
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {LINES, *(f"{name}-{number}.json" for name in ("plan", "measured", "trace") for number in (2, 3))}


def test_a_full_disk_is_told_once_and_what_fits_later_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder, write = ReportFolder(tmp_path / "report", "0123abcd", (1, 2, 3)), os.write

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(os, "write", full)
        written(folder, range(1, 3))
    for name, message in zip(("plan-1.json", LINES), caplog.messages, strict=True):
        assert f"{tmp_path}/report/{name}: No space left on device" in message
    monkeypatch.setattr(os, "write", write)
    written(folder, range(3, 4))
    assert (tmp_path / "report" / LINES).read_text() == '{"run": "0123abcd", "iteration": 3}\n'


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_whichever_step_fails_training_goes_on_and_it_is_told_with_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception]
):
    def report() -> list[str]:
        caplog.clear()
        written(ReportFolder(tmp_path / "report", "0123abcd", (2,)), range(1, 4))
        return caplog.messages

    reason, told = "No space left on device" if error is OSError else "no memory left", 0
    with caplog.at_level(logging.WARNING):
        for messages in swept(report, error):
            assert isinstance(messages, list)  # nothing is raised
            assert len(messages) <= 1
            told += len(messages)
            assert all(f"{tmp_path}/report" in one and reason in one for one in messages)
            for file in (tmp_path / "report").glob("*.json"):
                json.loads(file.read_text())  # whole, or not there
    assert told >= 20


def test_a_folder_that_cannot_be_made_is_told_with_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        written(ReportFolder(tmp_path / "file" / "report", "0123abcd"), range(1, 4))
    assert all(f"{tmp_path}/file/report" in one.getMessage() for one in caplog.records)
    assert len(caplog.records) == 2
