"""The command `memory`: what it prints of a batch, and what it says that fits."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
import sys
import threading

import pytest

from megatron_epp.cli import memory, reach
from megatron_epp.cli.main import main
from megatron_epp.plan.serialize import load
from megatron_epp.planner import limits
from megatron_epp.planner.limits import Limit
from megatron_epp.planner.service.worker import Worker

MODEL = shlex.split("--stages 2 --layers 4 --hidden 256 --ffn 1024 --heads 4 --kv-heads 2 --vocab 512 --slices 3")
BATCH = ["--lengths", "8192,700,300", *MODEL]
AT_HOST = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
UNHURRIED = ["--seconds", "100", "--no-megatron"]


@pytest.fixture
def report(capsys):
    def said(*argv: str) -> str:
        assert main(["memory", *BATCH, *UNHURRIED, *argv]) == 0
        return capsys.readouterr().out

    return said


def row_of(text: str, name: str) -> list[str]:
    """Return the figures in the columns behind a name."""
    found = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
    return found.removeprefix(name).split()


def test_states_of_an_optimizer_at_the_host_are_not_on_the_device(report):
    here, there = (row_of(report("--quick", *flags), "static, in all") for flags in ([], AT_HOST))
    assert all(float(with_states) > float(without) for with_states, without in zip(here, there, strict=True))


def test_the_peaks_are_those_of_the_same_plan(report, tmp_path, capsys):
    made_at = tmp_path / "plan.json"
    assert main(["plan", *BATCH, "--memory-gb", "0.2", "-o", str(made_at)]) == 0
    capsys.readouterr()
    made, text = load(made_at), report("--memory-gb", "0.2", "--quick")
    assert row_of(text, "peak") == [f"{peak / 2**20:.2f}" for peak in made.predicted.peak_bytes]
    assert row_of(text, "static, in all") == [f"{static / 2**20:.2f}" for static in made.static_bytes]
    assert row_of(text, "headroom") == [f"{(made.cap_bytes[0] - p) / 2**20:.2f}" for p in made.predicted.peak_bytes]


def test_the_columns_add_up_and_every_rank_has_a_curve(report):
    text = report("--quick")
    body = text.split("\n\n")[1].splitlines()
    rules = [number for number, line in enumerate(body) if line.startswith("---")]
    for rank in (0, 1):
        cells = [float(line[30:].split()[rank]) for line in body[1 : rules[0]] if len(line[30:].split()) == 2]
        held, peak = (float(row_of(text, name)[rank]) for name in ("static, in all", "peak"))
        assert 0 < sum(cells) <= held + 0.1 <= peak
    assert len(re.findall(r"^rank \d +[▁▂▃▄▅▆▇█]{40,} ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^rank \d peaks while \d[FB]\d+ runs and keeps chunks", text, re.MULTILINE)) == 2


def test_json_has_every_figure(report, monkeypatch):
    monkeypatch.setattr(limits, "CAP_BITS", 7)  # by default it takes a dozen plans
    found = json.loads(report("--json", "--offload"))
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        assert sum(rank["peak"].values()) == rank["peak_bytes"] == rank["cap_bytes"] - rank["headroom_bytes"]
        assert max(num_bytes for _, num_bytes in rank["live_bytes"]) == rank["peak_bytes"]
    assert set(found["limits"]) == {"without offload", "with offload"}
    smallest = found["limits"]["without offload"]["smallest_cap_bytes"]
    assert 0 < smallest["value"] <= max(rank["peak_bytes"] for rank in found["ranks"]) + smallest["step"]


def test_a_batch_that_does_not_fit_is_shown_with_the_smallest_cap_that_does(report):
    text = report("--memory-gb", "0.02")
    assert text.startswith("no plan fits a memory cap of")
    smallest, unit = row_of(text, "smallest cap for this batch (--memory-gb)")
    assert unit == "GiB"
    assert float(row_of(text, "cap")[0]) / 1024 == pytest.approx(float(smallest), abs=2e-4)
    assert main(["plan", *BATCH, "--memory-gb", smallest]) == 0
    assert main(["plan", *BATCH, "--memory-gb", str(0.99 * float(smallest))]) == 2


def answering(**answers: Limit):
    """Return questions with these answers, the rest of which take too long."""

    def questions(self):
        def forever():
            threading.Event().wait()

        known = {name: lambda name=name: (answers[name], None) for name in answers}
        return {name: known.get(name, forever) for name in ("alone", "with_rest", "batch", "cap")}

    return questions


def test_what_was_not_looked_further_for_says_or_more(report, monkeypatch):
    answers = {"alone": Limit(4096, 128), "with_rest": Limit(None, 1), "batch": Limit(48), "cap": Limit(2**30)}
    monkeypatch.setattr(limits.Limits, "questions", answering(**answers))
    text = report("--memory-gb", "0.2")
    assert row_of(text, "longest sequence, alone") == ["4,096", "tokens"]
    assert row_of(text, "longest sequence, with the others of the batch") == ["none", "fits"]
    assert row_of(text, "most sequences of such lengths") == ["48", "sequences", "or", "more"]


def test_when_time_is_over_it_prints_what_it_knows_and_leaves_no_process(report, monkeypatch):
    answers = {"alone": Limit(4096, 128), "batch": Limit(48, 48)}
    monkeypatch.setattr(limits.Limits, "questions", answering(**answers))
    text = report("--memory-gb", "0.2", "--seconds", "1")
    assert row_of(text, "longest sequence, alone") == ["4,096", "tokens"]
    assert row_of(text, "longest sequence, with the others of the batch") == ["not", "found", "in", "time", "(--seconds)"]
    assert row_of(text, "most sequences of such lengths") == ["48", "sequences", "or", "more,", "below", "96"]
    assert row_of(text, "smallest cap for this batch (--memory-gb)") == ["not", "found", "in", "time", "(--seconds)"]
    assert multiprocessing.active_children() == []
    assert "Not one size was tried in time for some of these limits, since planning alone took " in text
    assert "or more, or leave them out (--quick)." in text


def test_the_seconds_that_would_do_follow_from_the_sizes_that_were_tried(report, monkeypatch):
    def questions(self):
        def some():
            for _ in range(limits.TRIES["cap"]):
                self.tried()
            threading.Event().wait()

        return {"cap": some}

    monkeypatch.setattr(limits.Limits, "questions", questions)
    assert "By the sizes that were tried so far, --seconds " in report("--seconds", "2")
    monkeypatch.setattr(limits.Limits, "questions", answering(alone=Limit(1), with_rest=Limit(1), batch=Limit(1), cap=Limit(1)))
    assert "--seconds" not in report()


@pytest.mark.parametrize(
    ("unknown", "hint"),
    [
        ([], ""),
        ([(12, 3), (3, 3)], "By the sizes that were tried so far, --seconds 25 would do for all of these limits."),
        ([(12, 12)], "By the sizes that were tried so far, --seconds 8 would do"),
        ([(12, 3), (12, 0)], "since planning alone took 1 s: give --seconds 21 or more, or leave them out (--quick)."),
        ([(1200, 3)], "--seconds 2500 would do"),
    ],
)
def test_the_longest_that_is_not_found_decides(unknown, hint):
    said = reach._hint(unknown, 1.0, 6.0)
    assert hint in said
    assert bool(said) == bool(unknown)


def test_an_estimator_that_is_late_is_not_waited_for(capsys, monkeypatch):
    monkeypatch.setattr(memory, "Worker", lambda _: Worker(late_estimator))
    assert main(["memory", *BATCH, "--seconds", "1", "--quick"]) == 0
    assert "Megatron's own estimate: not there in time (--seconds)" in capsys.readouterr().out


def late_estimator():
    """Start the estimator's process where importing Megatron takes long."""
    threading.Event().wait()


def test_a_single_sequence_is_as_long_alone_as_with_the_others_of_the_batch(report):
    text = report("--lengths", "8192", "--memory-gb", "0.2")
    assert row_of(text, "longest sequence, alone") == row_of(text, "longest sequence, with the others of the batch")


def test_without_a_cap_it_says_how_to_give_one(report):
    assert "Without a cap (--memory-gb" in report()


def test_a_picture_is_drawn(report, tmp_path):
    report("--quick", "-o", str(tmp_path / "memory.png"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def without_megatron():
    """The estimator's process where Megatron is not installed."""
    sys.modules["megatron_epp.mcore.costs.estimate"] = None  # importing it is an ImportError
    return memory._estimator()


def test_without_megatron_one_line_says_so(capsys, monkeypatch):
    monkeypatch.setattr(memory, "Worker", lambda _: Worker(without_megatron))
    assert main(["memory", *BATCH, "--quick", "--seconds", "100"]) == 0
    assert "\nMegatron's own estimate: Megatron is not installed here\n" in capsys.readouterr().out


def test_a_batch_that_no_memory_would_help_is_refused_as_by_plan(capsys):
    too_fine = [*BATCH, "--chunk-tokens", "4", "--token-multiple", "8"]
    said = []
    for command in (["plan"], ["memory", *UNHURRIED]):
        assert main([*command, *too_fine]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1]
    assert "raise --chunk-tokens to 8" in said[0]
