"""The benchmarks for GPUs and of one rank alone, reduced: every part runs and figures fit together. None of them is judged.

The runs are in the set `slow`; what is done with their figures is not.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.plan.serialize import load
from megatron_epp.tools.launch import runs
from scripts.bench import kit_report
from scripts.bench.gpu import bench as bench_gpu
from scripts.bench.gpu import runs as gpu_runs
from scripts.bench.gpu.ranks import TWO, Row, compare
from tests.support.mcore import forked
from tests.support.mcore.forked import launch, succeeded
from tests.support.mcore.synthetic_documents import documents_of, write_pair


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


WAYS = ["elastic", "elastic, weights apart", "1F1B, packed, all recomputed"]


def alone(*arguments: object) -> str:
    return succeeded(launch(1, "-m", "scripts.bench.alone", *arguments)).output


def test_every_rank_runs_all_its_actions_by_itself_and_recompute_keeps_less(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    said = alone("--reduced", "--ways", *WAYS, "-o", folder)
    (tmp_path / "steps.tsv").write_text("alone\t0\t8\tpython\n")
    report = kit_report.joined(tmp_path)
    assert "alone              done (8 s)" in kit_report.text(report)
    rows = report["steps"][0]["figures"]["rows"]
    plans = [load(folder / f"plan-{way.replace(', ', '-').replace(' ', '-')}.json") for way in WAYS]
    assert said.count(" of compute; peak ") == sum(made.num_ranks for made in plans)
    for row, made in zip(rows, plans, strict=True):
        assert row["tokens_per_second"] == pytest.approx(1e6 * made.num_tokens / row["measured_us"])
    free, _, recomputed = (row["measured_bytes"] for row in rows)
    assert max(plans[-1].static_bytes) < recomputed < 0.9 * free


@pytest.mark.slow  # trains on two ranks first
def test_a_plan_that_a_training_has_run_is_put_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked.fork_runs(monkeypatch)
    data = write_pair(tmp_path / "documents", documents_of([n + 1 for n in (900, 40, 300, 700) * 6]))
    sizes = {"pipeline_model_parallel_size": 2, "seq_length": 1024, "train_iters": 3, "epp_trace": 3}
    runs.train(tmp_path / "run", 2, runs.tiny_gpt(**sizes, data_path=data))
    there = ["--plan", tmp_path / "run" / "plan.json", "--measured", tmp_path / "run" / "measured.json"]
    said = alone("--model", "tiny-gpt", *there, "-o", tmp_path)
    (found,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert f"by times of ranks alone {found['alone_us'] / found['in_training_us']:.3f} of it" in said
    assert found["measured_bytes"] == pytest.approx(found["planned_bytes"], rel=0.03)
