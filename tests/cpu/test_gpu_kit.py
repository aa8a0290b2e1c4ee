"""The kit for one GPU runs one command after the other, goes on when one fails, and reports all, as far as a CPU can tell."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from scripts.bench import device as bench
from scripts.bench import kit_report
from scripts.bench.gpu.bench import PARTS as TRAINING_PARTS

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "scripts" / "gpu_kit.sh"
PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    *"import numpy"*) exit {torch} ;;
    *is_available* | *mem_get_info*) exit {gpu} ;;
    *find_spec*pytest*) exit {pytest} ;;
    *find_spec*megatron*) exit {megatron} ;;
    *kit_report*) exit 0 ;;
    *doctor*) echo "no driver"; exit 3 ;;
    *"--only executor"*) sleep 60 ;;
    *) echo "ran $* with ${{PYTORCH_ALLOC_CONF:-the default}}" ;;
esac
"""
"""Answers for a machine, 0 for what it has; one command fails on it, and one takes too long."""


@pytest.fixture
def kit(tmp_path):
    def run(*options, limit="600", **lacks):
        python = tmp_path / "python"
        python.write_text(PYTHON.format(**{"torch": 0, "gpu": 0, "pytest": 0, "megatron": 0} | lacks))
        python.chmod(0o755)
        environment = {"PATH": "/usr/bin:/bin", "EPP_PYTHON": str(python), "EPP_KIT_LIMIT": limit}
        return subprocess.run(["bash", KIT, *options], env=environment, capture_output=True, text=True, check=False)

    return run


def commands(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_a_dry_run_tells_every_command_with_its_limit(kit):
    found = kit("--dry-run")
    assert found.returncode == 0
    lines = commands(found.stdout)
    assert all(line.startswith("timeout ") and "--reduced" not in line for line in lines.values())
    # `long` takes longer than a command may, and the tests of pipelines are the parts `ranks-...` and `loops`.
    assert {name for name, line in lines.items() if "scripts.bench.gpu" in line} == TRAINING_PARTS.keys() - {"long"}
    parts = {part for line in lines.values() if "scripts.bench.device" in line for part in line.split()[-3].split(",")}
    assert parts == bench.PARTS.keys()
    files = {word for line in lines.values() for word in line.split() if word.startswith("tests/gpu/")}
    alone = {"tests/gpu/test_gpu_pipeline.py"}
    assert files | alone == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_the_allocators_setting_is_on_but_for_the_control(kit, tmp_path):
    kit("--output", str(tmp_path), "--steps", "memory,memory-fixed")
    assert "with expandable_segments:True" in (tmp_path / "memory.txt").read_text()
    assert "with the default" in (tmp_path / "memory-fixed.txt").read_text()


def test_what_measures_no_time_runs_side_by_side_and_all_is_reported(kit, tmp_path):
    found = kit("--output", str(tmp_path), "--steps", "executor,kernels,race", limit="4")
    begins = found.stdout.index("executor: at most 4 s")
    assert begins < found.stdout.index("kernels: exit code 0") < found.stdout.index("executor: exit code 124")
    assert found.stdout.index("executor: exit code 124") < found.stdout.index("race: at most")
    again = kit("--output", str(tmp_path), "--steps", "kernels", "--seconds", "19")
    assert f"no time for: bash scripts/gpu_kit.sh --output {tmp_path} --steps kernels" in again.stdout
    assert {step["step"] for step in kit_report.joined(tmp_path)["steps"]} == {"executor", "kernels", "race"}


def test_it_goes_on_when_a_command_fails_or_takes_too_long_and_reports_each(kit, tmp_path):
    folder = tmp_path / "kit"
    found = kit("--output", str(folder), "--steps", "doctor,executor,memory,tests-megatron", limit="1", megatron=1)
    assert found.returncode == 1
    figures = {"rows": [{"case": "memory", "met": False}]}
    (folder / "memory").mkdir()
    (folder / "memory" / "report.json").write_text(json.dumps(figures))
    report = kit_report.joined(folder)
    steps = {step["step"]: step for step in report["steps"]}
    assert {name: step["exit"] for name, step in steps.items()} == {
        "doctor": 3, "executor": 124, "memory": 0, "tests-megatron": None,
    }  # fmt: skip
    assert steps["doctor"]["end"] == ["no driver"]
    assert steps["memory"]["figures"] == figures
    assert report["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    text = kit_report.text(report)
    for line in ("exit code 3", "took too long", "done; memory: goal missed", "left out: Megatron is not installed"):
        assert line in text


def test_the_parts_run_reduced_and_a_part_that_fails_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(bench.PARTS, "copies", lambda unit: 1 / 0)
    monkeypatch.setitem(bench._UNITS, "copies", 1)
    assert bench.BENCH.main(["--reduced", "--only", "executor,copies", "-o", str(tmp_path)]) == 1
    executor, failed = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert executor["met"]
    assert failed["failed"] == "ZeroDivisionError: division by zero"


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU, peaks are those of autograd; with one, tests/gpu runs")
def test_peaks_are_counted_without_a_device():
    sliced, _ = bench.plans(12, 0)
    again, _ = bench.plans(12, 4)
    assert 0 < bench.peaks(again)["counted"] < bench.peaks(sliced)["counted"]
