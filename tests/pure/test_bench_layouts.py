"""The benchmark of layouts, on its reduced set: its figures are there, and the searched layout is not slower than others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.layouts.bench import LAYOUTS, all_runs, markdown, summary


@pytest.mark.slow  # searches eight layouts; test_bench_planner has a reduced benchmark of the same kind
def test_the_reduced_set_compares_all_layouts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.layouts", "--reduced", "--json", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == report["summary"]["planned"] == 2
    for row in report["rows"]:
        layouts = row["layouts"]
        assert tuple(layouts) == LAYOUTS
        others = [one["makespan_us"] for one in layouts.values() if not one["shards_vocabulary"]]
        assert layouts["auto"]["makespan_us"] <= 1.005 * min(others)
        assert layouts["vocabulary"]["makespan_us"] <= 1.005 * layouts["auto"]["makespan_us"]
        assert layouts["auto"]["makespan_us"] < row["rivals"]["seq1f1b"]
        for one in layouts.values():
            assert one["bound_us"] <= one["makespan_us"]
            assert 0.7 < one["efficiency"] <= one["best_efficiency"] <= 1
    assert report["summary"]["over_auto"]["auto"] == 1
    assert markdown(report["summary"], ("seq1f1b",)) in done.stdout


def test_there_are_runs_of_every_model_number_of_ranks_and_cap() -> None:
    runs = all_runs()
    assert len({(run.model, run.stages, run.cap_gb) for run in runs}) == len(runs) == 27
    for values in ({run.lengths_like for run in runs}, {run.context for run in runs}):
        assert len(values) == 3


def test_runs_without_plans_have_no_figures() -> None:
    row = {"layouts": {name: {"makespan_us": None} for name in LAYOUTS}, "rivals": {"seq1f1b": None}}
    assert markdown(summary([row], ("seq1f1b",)), ("seq1f1b",)) == "no run has a plan with every layout"
