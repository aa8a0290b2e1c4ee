"""Reports are diagnostics, made in a thread that training does not wait for; a resumed run has the costs learnt before."""

import errno
import json
import logging
import os
import re
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from megatron_epp import wrap
from megatron_epp.cost.kept import FILE_NAME, RECORDED, WARM_UP, from_state
from megatron_epp.features.report_files.report_folder import LINES, ReportFolder
from megatron_epp.launch.run_folder import LOCK
from megatron_epp.mcore.iteration.loggers import Log, Reports
from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.serialize import load
from megatron_epp.runtime import side_thread
from megatron_epp.runtime.side_thread import complete_at_end
from tests.support.failing_disk import swept
from tests.support.mcore.changed_training import COLLECTIVES, PASSES, collective_us, pass_us
from tests.support.mcore.forked import CHANGED, job, launch, of_ranks, succeeded, train
from tests.support.mcore.jobs.soak import ITERATIONS
from tests.support.mcore.launch import CHOOSING, PLANNED
from tests.support.mcore.rows import FIRST_LEARNT, LEARN
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


FLAGS = shlex.split("--pipeline-model-parallel-size 2 --global-batch-size 4 --split 80,20,0 --eval-iters 1 --eval-interval 3")
FLAGS += ["--log-interval", "2", "--train-iters", "6"]


def trained(folder: Path, *program: object, flags: Sequence[object] = ()) -> tuple[str, list[dict[str, Any]]]:
    """Train on two ranks; return the output, and the lines of the report in a folder."""
    data = write_pair(folder / "documents", documents_of(long_tailed_lengths(100, 32), vocab_size=127))
    places = "--data-path", data, "--epp-report-dir", folder / "report"
    finished = succeeded(launch(2, *program, *PLANNED, *FLAGS, *places, *flags))
    return finished.output, [json.loads(line) for line in (folder / "report" / "iterations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("flags", "last"), [((), 6), (("--exit-interval", 4), 4)], ids=["to the end", "ends early"])
def test_every_iteration_of_a_training_is_reported_once_in_order(tmp_path: Path, flags: tuple[object, ...], last: int) -> None:
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


def test_a_full_disk_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
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
def test_a_failing_step_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[Exception]):
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


LENGTHS = (180, 12, 60, 33, 7, 90, 25, 140)
"""Six of them train, so every batch has the same lengths in another order."""


def test_every_iteration_says_how_long_it_was_planned_and_planning_ends_with_training(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(LENGTHS, vocab_size=255))
    succeeded(job(2, "soak:left", data=data, folder=tmp_path, timeout_s=400))
    lines = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert len(lines) == ITERATIONS
    assert all(line["planning_us"] > 0 for line in lines)
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["", ""]


TRAINING = CHOOSING + shlex.split(
    "--pipeline-model-parallel-size 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope "
    f"--override-opt-param-scheduler --vocab-size 255 --split 80,20,0 --eval-iters 1 --eval-interval 100 {LEARN}"
)


def test_a_resumed_run_plans_by_the_learnt_costs_from_its_first_batch(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(80, 64), vocab_size=255))
    kept = tmp_path / "checkpoints"

    def train(iterations: int, *flags: object) -> str:
        arguments = [*TRAINING, "--data-path", data, "--train-iters", iterations, "--epp-report-dir", tmp_path / "report"]
        return succeeded(launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *arguments, *flags)).output

    log = train(WARM_UP + RECORDED, "--save", kept, "--save-interval", WARM_UP + RECORDED)  # ends before learnt plans
    said = re.findall(r"costs learnt from (\d+) iterations: they took ([\d.]+) of the time by formulas .* batch (\d+)", log)
    assert [(number, batch) for number, _, batch in said] == [(str(RECORDED), str(FIRST_LEARNT))]
    assert float(said[0][1]) > 0
    (one,) = from_state(json.loads((kept / FILE_NAME).read_text()))
    assert one.costs.name == "learnt"
    resumed = train(WARM_UP + RECORDED + 1, "--load", kept, "--epp-trace", WARM_UP + RECORDED + 1)
    assert "costs learnt from" not in resumed
    assert "costs are those that an earlier run of this model has learnt" in resumed
    assert load(tmp_path / "report" / "plan.json").costs == "learnt"


LEARNING = WARM_UP + RECORDED
SCRIPT = ("--pipeline-model-parallel-size", 2, "--epp", "--epp-microbatches", "user")
LONGER = ("--override-opt-param-scheduler",)
WHILE = "while costs are learnt"


def test_a_resumed_script_starts_with_the_costs_of_the_run_before(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    before = train(tmp_path / "before", 2, *SCRIPT, "--save", kept, "--save-interval", LEARNING, iterations=LEARNING)
    assert WHILE in before.output
    text = (kept / FILE_NAME).read_text()
    (one,) = from_state(json.loads(text))
    assert one.costs.name == "learnt"
    assert (kept / LOCK).exists()  # no other run writes there meanwhile
    later = ("--load", kept, "--save", tmp_path / "later", "--save-interval", LEARNING + 2)
    after = train(tmp_path / "after", 2, *SCRIPT, *later, *LONGER, iterations=LEARNING + 2)
    assert (tmp_path / "later" / FILE_NAME).read_text() == text
    assert sorted(after.steps) == [LEARNING + 1, LEARNING + 2]
    assert WHILE not in after.output
    assert "costs are those that an earlier run of this model has learnt" in after.output
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
    other = train(tmp_path / "other", 2, *SCRIPT, "--load", kept, *LONGER, *recompute, iterations=LEARNING + 1)
    assert WHILE in other.output
    said = re.findall(r"costs are learnt again: .* since (.*)", other.output)
    assert len(said) == 1
    assert "--recompute-granularity was None and is full" in said[0]
    assert (kept / FILE_NAME).read_text() == text


def test_a_damaged_file_is_learnt_again(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"half a fi')
    run = train(tmp_path / "run", 2, *SCRIPT, "--load", tmp_path, iterations=1)
    assert WHILE in run.output
    assert re.search(rf"{FILE_NAME}: .*Costs are learnt again", run.output)


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, Any], ...]:
    finished = job(2, "frameworks:learnt")
    ranks = of_ranks(finished)
    assert "the device was another one and is cpu" in finished.output
    assert len(ranks) == 2
    return ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_framework_keeps_costs_by_the_state_of_its_schedule(said: tuple[dict[str, Any], ...], rank: int) -> None:
    learning, resumed, elsewhere = said[rank]["schedules"]
    assert [one["learns"] for one in (learning, resumed, elsewhere)] == [False, False, True]
    assert resumed["state"] == learning["state"]
    assert len(elsewhere["state"]["pipelines"]) == 1
    assert "before the first call" in said[rank]["late"]


def test_all_ranks_have_the_same_state(said: tuple[dict[str, Any], ...]) -> None:
    states = [one["state"] for rank in said for one in rank["schedules"][:2]]
    assert len({json.dumps(state, sort_keys=True) for state in states}) == 1


def test_a_framework_may_ask_for_learnt_costs_and_for_no_others() -> None:
    wrap(costs="learn")
    for other in ("measure", "costs.json"):
        with pytest.raises(EppError, match=f"leave out costs={other!r}"):
            wrap(costs=other)


LOOKAHEAD = 1
FIRST = LEARNING + LOOKAHEAD + 1
"""First batch that is planned by learnt costs."""
OF_SHARDS = shlex.split(
    "--pipeline-model-parallel-size 2 --seq-length 64 --max-position-embeddings 64 --untie-embeddings-and-output-weights "
    f"--vocab-size 255 --save-interval {LEARNING} --train-iters {FIRST} "
    f"--epp-vocab-parallel on --epp-costs learn --epp-lookahead {LOOKAHEAD} --epp-trace {FIRST - 1} {FIRST}"
)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a training on two ranks, with its log, plans and checkpoints."""
    place = tmp_path_factory.mktemp("learnt")
    data = write_pair(place / "documents", documents_of(long_tailed_lengths(80, 64), vocab_size=255))
    flags = [*PLANNED, *OF_SHARDS, "--data-path", data, "--save", place / "checkpoints", "--epp-report-dir", place]
    finished = launch(2, CHANGED, "given_times", *flags)
    assert finished.returncode == 0, finished.output[-5000:]
    (place / "log").write_text(finished.output)
    return place


def ratios(plan: Plan) -> list[float]:
    """Planned over given times of all passes and collectives of shards."""
    passes = [step for row in plan.ranks for step in row if step.action.op in PASSES]
    found = [step.time_us / pass_us(plan, step.action) for step in passes]
    for op in COLLECTIVES:
        for chunk, time_us in enumerate(dict(plan.messages.collective_us)[op]):
            found.append(time_us / collective_us(plan, Action(op, 0, chunk)))
    assert len(found) == (2 * plan.num_ranks + 2) * len(plan.chunks)
    return found


def test_plans_change_to_the_times_of_shards_that_were_measured(folder: Path) -> None:
    before, after = (load(folder / f"plan-{number}.json") for number in (FIRST - 1, FIRST))
    assert after.costs == "learnt"
    assert ratios(after) == pytest.approx([1.0] * len(ratios(after)), rel=TOLERANCE)
    assert max(ratios(before)) < 0.5  # by formulas


def test_the_log_says_how_far_off_formulas_of_shards_were(folder: Path) -> None:
    said = re.findall(
        r"costs learnt from 3 iterations: .*, vocabulary shards ([\d.]+), their collectives ([\d.]+)\)",
        (folder / "log").read_text(),
    )
    assert len(said) == 1
    assert all(float(ratio) > 2.0 for ratio in said[0])


def test_times_of_shards_are_kept_with_the_checkpoints(folder: Path) -> None:
    (one,) = from_state(json.loads((folder / "checkpoints" / FILE_NAME).read_text()))
    assert one.costs.vocabulary.logits.per_token_us == pytest.approx(PASSES[Op.S].per_token_us, rel=TOLERANCE)
