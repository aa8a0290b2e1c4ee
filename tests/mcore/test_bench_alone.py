"""Ranks of a plan run by themselves, with real layers: every action is timed, and put on the plan's dependencies."""

import json
from pathlib import Path

import pytest

from megatron_epp.plan.serialize import load
from megatron_epp.tools.launch import runs
from scripts.bench import kit_report
from tests.support.mcore import forked
from tests.support.mcore.forked import launch
from tests.support.mcore.synthetic_documents import documents_of, write_pair

WAYS = ["elastic", "elastic, weights apart", "1F1B, packed, all recomputed"]


def alone(*arguments: object) -> str:
    finished = launch(1, "-m", "scripts.bench.alone", *arguments)
    assert finished.returncode == 0, finished.output[-5000:]
    return finished.output


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
