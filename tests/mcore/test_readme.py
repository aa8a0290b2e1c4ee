"""The README's commands do what it says."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

import megatron_epp
from megatron_epp.contrib.demos import quickstart
from megatron_epp.losses import Average, ClippedRatio
from megatron_epp.tools.cli.main import main
from tests.support import ROOT
from tests.support.mcore import forked
from tests.support.seeds import some_by_default

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
HOW = (ROOT / "docs" / "how-it-works.md").read_text()
(LOOP,), (EXAMPLE,) = (re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for page in (README, HOW))
TEST_COMMAND = "bash scripts/test.sh"
QUICKSTART = "bash scripts/quickstart.sh\n"


def run(block):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_the_test_command_is_what_ci_runs():
    assert f"`{TEST_COMMAND}`" in (ROOT / "CONTRIBUTING.md").read_text()
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()


@some_by_default("sizes", ["--context 8192 --global-batch-size 2", "--context 131072 --global-batch-size 32"], 1)
def test_the_other_shell_block_runs(sizes):
    (block,) = (block for block in BLOCKS if block != QUICKSTART)
    assert block.count("--context 131072 --global-batch-size 32") == 1
    run(block.replace("--context 131072 --global-batch-size 32", sizes))


def test_the_python_example_draws_a_plan_that_is_proven(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", EXAMPLE], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_loop_calls_what_there_is(monkeypatch):
    """`docs/examples/grpo.py`, which another test runs, is the whole of it."""
    calls = []

    def wrap_samples(*, loss, memory_cap_gb):
        names = (loss.name, *loss.logged)
        return lambda **given: calls.append(given) or SimpleNamespace(means=dict.fromkeys(names, memory_cap_gb))

    monkeypatch.setattr(megatron_epp, "wrap_samples", wrap_samples)
    policy = object()
    given = {"megatron_epp": megatron_epp, "ClippedRatio": ClippedRatio, "Average": Average}
    exec(LOOP, given | {"policy": policy, "samples": []})
    assert calls == [{"model": policy, "samples": []}]


def test_the_quickstart_script_knows_the_commands_flags():
    assert QUICKSTART in BLOCKS
    run(f"{QUICKSTART.strip()} --help | grep -- --rounds\n")


def quickstart_report(folder):
    report = json.loads((folder / "report.json").read_text())
    assert max(report[part]["max_relative_loss_difference"] for part in ("parity", "skewed", "long_document")) < 1e-5
    assert report["parity"]["gradients"] < 1e-5
    long = report["long_document"]
    assert long["elastic_bytes"] <= long["cap_bytes"] < min(long["whole_bytes"], long["needed_bytes"])
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"report.json", "plan.json", "iteration.html"}
    return report["skewed"]


def test_the_quickstart_trains_small_sizes_and_leaves_its_comparison(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quickstart, "Forks", lambda *args: forked.forks())
    assert main(["quickstart", "--rounds", "1", "--context", "256", "-o", str(tmp_path)]) == 0
    assert "inconclusive: " in capsys.readouterr().out  # one round has no spread
    assert all(one["tokens_per_second"][0] > 0 for one in quickstart_report(tmp_path)["schedules"].values())


@pytest.mark.slow  # minutes
def test_the_quickstart_gains_what_it_says():
    run(QUICKSTART)
    schedules = (skewed := quickstart_report(folder := ROOT / "runs" / "quickstart"))["schedules"]
    assert schedules["elastic plans"]["peak_bytes"] < schedules["1F1B, whole documents"]["peak_bytes"]
    assert schedules["elastic plans"]["losses"][-1] < schedules["elastic plans"]["losses"][0]
    assert skewed["elastic_over_whole"]["planned"] > 1.25
    assert all(len(one["tokens_per_second"]) == 5 for one in schedules.values())
    assert "</html>" in (folder / "iteration.html").read_text()
