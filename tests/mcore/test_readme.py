"""The README's commands do what it says."""

import json
import re
import subprocess

import pytest

from tests.support import ROOT

BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
TEST_COMMAND = "bash scripts/test.sh\n"
QUICKSTART = "bash scripts/quickstart.sh\n"


def run(block):
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_the_test_command_is_what_ci_runs():
    assert TEST_COMMAND in BLOCKS
    assert "scripts/test.sh" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b not in (TEST_COMMAND, QUICKSTART)], ids=lambda b: b.split("\n")[0])
def test_every_other_shell_block_runs(block):
    run(block)


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [("--iterations 5 --context 1024", 5), pytest.param("", 20, marks=pytest.mark.slow, id="as it stands")],
)
def test_the_quickstart_leaves_its_comparison_behind(flags, iterations):
    assert QUICKSTART in BLOCKS
    run(f"{QUICKSTART.strip()} {flags}\n")
    folder = ROOT / "runs" / "quickstart"
    report = json.loads((folder / "report.json").read_text())
    assert len(report["losses"]["stock"]) == len(report["losses"]["epp"]) == iterations
    assert report["losses"]["epp"][-1] < report["losses"]["epp"][0]
    print(f"largest relative difference of the losses: {report['max_relative_loss_difference']:.1e}")
    assert report["max_relative_loss_difference"] < 1e-5
    for figures in ("tokens_per_second", "peak_activation_bytes"):
        assert report[figures]["stock"] > 0
        assert report[figures]["epp"] > 0
    assert set(report["bubble_fraction"]) == {"planned", "measured"}
    assert json.loads((folder / "plan.json").read_text())["schema"] == "megatron-epp/plan"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert (folder / "iteration.png").read_bytes().startswith(b"\x89PNG")
