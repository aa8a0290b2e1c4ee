"""The benchmark of small cases: greedy is never faster than the optimum, and cases are solved once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.small_cases import MOST_ACTIONS, main, summary


def test_greedy_is_no_faster_than_the_best_plan_and_a_seed_is_solved_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")
    asked = ["--limit-s", "20", "-o", str(tmp_path / "found.jsonl"), "--seeds"]
    assert main([*asked, "5:6"]) == 0
    assert main([*asked, "5:7"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["seed"] for row in rows] == [5, 6]
    for row in rows:
        assert row["greedy_us"] >= row["best_us"] * (1 - 1e-9) >= row["bound_us"] * (1 - 1e-9) > 0
        assert row["chunks"] * row["stages"] // row["ranks"] * (3 if row["split_weight"] else 2) <= MOST_ACTIONS
    assert "2 cases" in capsys.readouterr().out


def test_the_summary_has_only_gaps_to_proven_optima():
    proven = {"seed": 1, "greedy_us": 103.0, "best_us": 100.0, "bound_us": 100.0}
    open_case = {"seed": 2, "greedy_us": 200.0, "best_us": 100.0, "bound_us": 90.0}
    said = summary([proven, open_case])
    assert said == "2 cases, 1 proven; greedy above the optimum: mean 3.00%, worst 3.00% (seed 1)"
    assert summary([open_case]) == "1 cases, 0 proven"
