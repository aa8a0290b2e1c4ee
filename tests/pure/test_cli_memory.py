"""`plan --memory`: what it prints of a batch, and the smallest cap."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from megatron_epp.cli.main import main
from megatron_epp.plan.serialize import load

MODEL = shlex.split("--stages 2 --layers 4 --hidden 256 --ffn 1024 --heads 4 --kv-heads 2 --vocab 512 --slices 3")
BATCH = ["--lengths", "8192,700,300", *MODEL]
AT_HOST = ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]


@pytest.fixture
def report(capsys):
    def said(*argv: str) -> str:
        assert main(["plan", "--memory", *BATCH, *argv]) == 0
        return capsys.readouterr().out

    return said


def row_of(text: str, name: str) -> list[str]:
    """Return the figures in the columns behind a name."""
    found = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
    return found.removeprefix(name).split()


def test_states_of_an_optimizer_at_the_host_are_not_on_the_device(report):
    here, there = (row_of(report(*flags), "static, in all") for flags in ([], AT_HOST))
    assert all(float(with_states) > float(without) for with_states, without in zip(here, there, strict=True))


def test_the_peaks_are_those_of_the_same_plan(report, tmp_path, capsys):
    made_at = tmp_path / "plan.json"
    assert main(["plan", *BATCH, "--memory-gb", "0.2", "-o", str(made_at)]) == 0
    capsys.readouterr()
    made, text = load(made_at), report("--memory-gb", "0.2")
    assert row_of(text, "peak") == [f"{peak / 2**20:.2f}" for peak in made.predicted.peak_bytes]
    assert row_of(text, "static, in all") == [f"{static / 2**20:.2f}" for static in made.static_bytes]
    assert row_of(text, "headroom") == [f"{(made.cap_bytes[0] - p) / 2**20:.2f}" for p in made.predicted.peak_bytes]


def test_the_columns_add_up_and_every_rank_has_a_curve(report):
    text = report()
    body = text.split("\n\n")[1].splitlines()
    rules = [number for number, line in enumerate(body) if line.startswith("---")]
    for rank in (0, 1):
        cells = [float(line[30:].split()[rank]) for line in body[1 : rules[0]] if len(line[30:].split()) == 2]
        held, peak = (float(row_of(text, name)[rank]) for name in ("static, in all", "peak"))
        assert 0 < sum(cells) <= held + 0.1 <= peak
    assert len(re.findall(r"^rank \d +[▁▂▃▄▅▆▇█]{40,} ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^rank \d peaks while \d[FB]\d+ runs and keeps chunks", text, re.MULTILINE)) == 2


def test_json_has_every_figure(report):
    said = json.loads(report("--json"))
    assert said["refusal"] == ""
    assert [rank["rank"] for rank in said["ranks"]] == [0, 1]
    for rank in said["ranks"]:
        assert sum(rank["peak"].values()) == rank["peak_bytes"] == rank["cap_bytes"] - rank["headroom_bytes"]
        assert max(num_bytes for _, num_bytes in rank["live_bytes"]) == rank["peak_bytes"]
    smallest = said["smallest_cap"]["without offload"]
    assert 0 < smallest["cap_bytes"] <= max(rank["peak_bytes"] for rank in said["ranks"])
    assert smallest["makespan_us"] > 0


def test_a_batch_that_does_not_fit_is_shown_with_the_smallest_cap_that_does_and_not_written(report, tmp_path):
    text = report("--memory-gb", "0.02", "-o", str(tmp_path / "plan.json"))
    assert not (tmp_path / "plan.json").exists()
    assert text.startswith("no plan fits a memory cap of")
    smallest, unit, *_ = row_of(text, "without offload")
    assert unit == "GiB"
    assert float(row_of(text, "cap")[0]) / 1024 == pytest.approx(float(smallest), abs=2e-4)
    assert main(["plan", *BATCH, "--memory-gb", smallest]) == 0
    assert main(["plan", *BATCH, "--memory-gb", str(0.99 * float(smallest))]) == 2


def test_a_picture_and_the_plan_are_written(report, tmp_path):
    report("--memory-out", str(tmp_path / "memory.png"), "-o", str(tmp_path / "plan.json"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert load(tmp_path / "plan.json").lengths == (8192, 700, 300)


def test_the_old_name_says_the_same(report, capsys):
    text = report()
    assert main(["memory", *BATCH]) == 0
    assert capsys.readouterr().out == text


def test_a_batch_that_no_memory_would_help_is_refused_as_without_it(capsys):
    too_fine = [*BATCH, "--chunk-tokens", "4", "--token-multiple", "8"]
    for command in (["plan"], ["plan", "--memory"]):
        assert main([*command, *too_fine]) == 2
        assert "raise --chunk-tokens to 8" in capsys.readouterr().err
