"""The benchmark for GPUs, reduced: every part runs and its figures fit together. None of them is judged.

The runs are in the set `slow`; what is done with their figures is not.
"""

import json
import subprocess
import sys

import pytest

from scripts.bench.gpu import bench as bench_gpu
from scripts.bench.gpu import runs as gpu_runs
from scripts.bench.gpu.ranks import TWO, Row, compare
from tests.support.mcore import forked


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-W", "ignore", "-m", "scripts.bench.gpu", "--reduced", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "report.md").read_text() in done.stdout
    return {row["case"]: row for row in json.loads((folder / "report.json").read_text())["rows"]}


@pytest.mark.slow
def test_every_part_runs_and_its_figures_fit_together(report):
    assert list(report) == list(bench_gpu.PARTS)
    assert all("failed" not in part and part["seconds"] >= 0 for part in report.values())
    parity, slices, copies, race = (report[name] for name in ("parity", "slices", "copies", "race"))
    assert parity["met"], parity
    assert all(row["theirs"] > 0 for row in parity["rows"].values()), "bf16 and fp32 cannot agree to the bit"
    speed = slices["tokens_per_second"]
    assert slices["sliced_over_unsliced"] == pytest.approx(speed["sliced"] / speed["unsliced"])
    assert slices["losses"]["sliced"] == pytest.approx(slices["losses"]["unsliced"], rel=1e-4)
    free, capped = report["peaks"]["rows"].values()
    assert free["recompute_share"] == 0 < capped["recompute_share"]
    assert capped["measured_bytes"] < free["measured_bytes"]
    for row in (free, capped):
        assert row["error"] == pytest.approx(row["planned_bytes"] / row["measured_bytes"] - 1)
    assert copies["offload_share"] > 0
    assert copies["copies_us"] > 0
    assert 0 <= copies["hidden_share"] <= 1
    assert race["failures"] == {}
    assert set(race["tokens_per_second"]) == {"plans", "packed, all recomputed", "packed, 1 layers kept"}
    assert race["losses"]["plans"][:3] == pytest.approx(race["losses"]["packed, 1 layers kept"][:3], rel=1e-2)
    for name in ("ranks-1", "ranks-2", "ranks-4", "loops"):
        assert report[name]["met"], report[name]


def test_a_training_that_differs_or_fails_is_told_from_one_that_agrees(tmp_path, monkeypatch):
    forked.fork_runs(monkeypatch)
    rows = {"same": Row(2, TWO), "other weights": Row(2, TWO, {"seed": 7}), "refused": Row(2, TWO, {"epp_slices": 0})}
    found = compare(gpu_runs.Launches(tmp_path, 120), gpu_runs.Sizes.reduced(), rows)
    assert found["same"]["holds"]
    assert not found["other weights"]["holds"]
    assert found["other weights"]["ours"] > 1e-3 > found["other weights"]["allowed"]
    assert "epp-slices" in found["refused"]["failed"]
