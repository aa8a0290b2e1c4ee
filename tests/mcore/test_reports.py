"""Reports are made in a thread and are diagnostics: training does not wait for them, and goes on where none can be written."""

import errno
import json
import logging
import os
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_epp.features.report_files.report_folder import LINES, ReportFolder
from megatron_epp.mcore.iteration.report_thread import Log, Reports
from megatron_epp.runtime import side_thread
from megatron_epp.runtime.side_thread import complete_at_end
from tests.support.failing_disk import swept
from tests.support.mcore.forked import CHANGED, launch
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.plan.report_plans import measured_run, sliced_plan


def test_training_goes_on_while_a_report_is_made_and_its_lines_are_written_in_the_training_thread() -> None:
    reports, may_end, threads = Reports(), threading.Event(), []

    def work() -> Log:
        assert may_end.wait(60)
        threads.append(threading.current_thread())
        return lambda: threads.append(threading.current_thread())

    reports.begin(work)
    assert not threads, "begin returns before the report is made"
    may_end.set()
    reports.complete()
    assert [thread.name for thread in threads] == ["epp-reports", threading.current_thread().name]
    reports.complete()
    assert len(threads) == 2, "lines are written once"


def test_an_error_of_a_report_is_raised_in_training_at_the_next_iteration() -> None:
    reports = Reports()
    reports.begin(lambda: int("no number"))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no number"):
        reports.begin(lambda: None)


def test_after_a_failure_a_run_ends_though_a_report_waits_for_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_thread, "PATIENCE_S", 0.01)
    reports, never = Reports(), threading.Event()
    reports.begin(never.wait)  # type: ignore[arg-type]

    def training() -> None:
        try:
            raise RuntimeError("of the training")
        finally:
            complete_at_end(reports.complete)

    with pytest.raises(RuntimeError, match="of the training"):
        training()
    never.set()


FLAGS = shlex.split(
    "--pipeline-model-parallel-size 2 --global-batch-size 4 --split 80,20,0 --eval-iters 1 --eval-interval 3 --log-interval 2 "
    "--train-iters 6"
)


def trained(folder: Path, *program: object, flags: Sequence[object] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Train on two ranks; return the output, and the lines of the report in a folder."""
    data = write_pair(folder / "documents", documents_of(long_tailed_lengths(100, 32), vocab_size=127))
    places = "--data-path", data, "--epp-report-dir", folder / "report"
    finished = launch(2, *program, *PLANNED, *FLAGS, *places, *flags)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished.output, [json.loads(line) for line in (folder / "report" / "iterations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("flags", "last"), [((), 6), (("--exit-interval", 4), 4)], ids=["to the end", "ends early"])
def test_every_iteration_of_a_training_is_reported_once_and_in_order(
    tmp_path: Path, flags: tuple[object, ...], last: int
) -> None:
    output, lines = trained(tmp_path, "-m", "megatron_epp.mcore.pretrain_gpt", flags=flags)
    assert [line["iteration"] for line in lines] == list(range(1, last + 1))
    logged = [line.split(" | ")[0] for line in output.splitlines() if "epp iteration" in line]
    assert [int(line.split()[-1]) for line in logged] == list(range(2, last + 1, 2))
    if last == 6:  # Megatron's line of the last iteration: writers may be closed behind it
        assert output.index("epp iteration 6 ") < output.index("iteration        6/")
        tokens = sum(line["tokens"] for line in lines[1::2])
        bubble = fmean(line["bubble_fraction"]["measured"] for line in lines[1::2])
        figures = f"logged iterations: 3 with {tokens:,} tokens | mean bubble of these: {bubble:.1%} measured"
        ending = f"epp run has ended after iteration 6 | {figures} | reports: {tmp_path / 'report'}"
        assert output.count("epp run") == output.count(ending) == 1


def test_diagnostics_take_no_memory_for_tensors_so_that_none_can_be_missing(tmp_path: Path) -> None:
    flags = "--epp-trace", 2, "--epp-costs", "learn", "--pipeline-model-parallel-size", 1
    _, lines = trained(tmp_path, CHANGED, "diagnostics_without_memory", flags=flags)
    assert [line["replicas"] for line in lines] == [2] * 6
    assert (tmp_path / "report" / "trace.json").exists()


def written(folder: ReportFolder, iterations: range) -> None:
    made = sliced_plan(num_ranks=2, slices=2, batched=1)
    for iteration in iterations:
        folder.report({"iteration": iteration}, made, measured_run(made))


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
