"""Benchmarks of plans run in their reduced form, and their figures fit together. No time is judged."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts.bench.long.bench import VARIANTS as LEVERS
from scripts.bench.memory.bench import BASE
from scripts.bench.memory.bench import VARIANTS as FEATURES

from scripts.bench.layouts.bench import LAYOUTS
from scripts.bench.planner.bench import against
from scripts.bench.planner.fixed import FIXED
from scripts.bench.planner.suite import RIVALS
from tests.support.seeds import some_by_default


def check_balance(rows: Any) -> None:
    assert {row["replicas"] for row in rows} == {2, 8}
    assert all(row["floor"] <= row["by_time"] < row["by_count"] / 4 for row in rows)


def check_layouts(report: Any) -> None:
    assert len(report["rows"]) == report["summary"]["planned"] == 2
    for row in report["rows"]:
        layouts = row["layouts"]
        assert tuple(layouts) == LAYOUTS
        assert layouts["auto"]["makespan_us"] <= 1.005 * min(
            one["makespan_us"] for one in layouts.values() if not one["shards_vocabulary"]
        )
        assert layouts["vocabulary"]["makespan_us"] <= 1.005 * layouts["auto"]["makespan_us"]
        assert layouts["auto"]["makespan_us"] < row["rivals"]["seq1f1b"]
        for one in layouts.values():
            assert one["bound_us"] <= one["makespan_us"]
            assert 0.7 < one["efficiency"] <= one["best_efficiency"] <= 1


def check_long(report: Any) -> None:
    """More levers fit more and are no slower."""
    for row in report["rows"].values():
        times = [found["makespan_s"] if (found := row[name]) else float("inf") for name in LEVERS]
        assert times == sorted(times, reverse=True)
    assert report["rows"]["64"]["offload, KV offload"]["kv_offload_stages"] > 0
    assert report["rows"]["64"]["recompute"] is None


def check_memory(report: Any) -> None:
    for row in report["rows"]:
        assert all(row["longest"][name] >= row["longest"][BASE] > 0 for name in FEATURES)
        for figures in (figures for figures in row["caps"].values() if figures[BASE] is not None):
            for own in filter(None, figures.values()):
                assert own["makespan_us"] <= figures[BASE]["makespan_us"] * 1.01
                assert 0 < own["efficiency"] <= own["busiest"] <= 1


def check_planner(report: Any) -> None:
    for row in (row for row in report["large"]["rows"] if "gap" in row):
        for plan in (row, row["all_features"]):
            assert plan["gap"] >= -1e-9
            assert plan["peak_over_cap"] <= 1.0
            assert plan["gap_of_recompute"] + plan["gap_of_waiting"] == pytest.approx(plan["gap"], abs=1e-9)
    for part, rivals in (("large", RIVALS), ("runs", FIXED)):
        for key in ("against", "against_all_features"):
            assert report[part][key] == {name: against(report[part]["rows"], name, key != "against") for name in rivals}
    for row in report["runs"]["rows"]:
        fitting = {name: rival for name, rival in row["rivals"].items() if rival["makespan_us"] is not None}
        assert fitting
        for name, rival in fitting.items():
            has = {key: rival[key] is not None for key in ("chunk_tokens", "retain", "recompute")}
            chunkflow, whole = name == "chunkflow", name.startswith("1f1b")
            assert has == {"chunk_tokens": not whole, "retain": chunkflow, "recompute": not chunkflow}
    assert [row["sequences"] for row in report["speed"]] == [64, 128]


BENCHES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "balance": ("--reduced --json FOLDER/report.json", check_balance),
    "layouts": ("--reduced --json FOLDER/report.json", check_layouts),
    "long": ("--stages 4 --cap-gb 20 --contexts 32 64 -o FOLDER", check_long),
    "memory": ("--reduced -o FOLDER", check_memory),
    "planner": ("--reduced -o FOLDER", check_planner),
}
"""Arguments of each, and what its figures must be."""


@some_by_default("name", [*BENCHES], 1)  # the others take up to a minute; what they plan is tested where it belongs
def test_a_benchmark_runs_in_its_reduced_form_and_prints_its_report(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, check = BENCHES[name]
    monkeypatch.setattr(sys, "argv", [name, *arguments.replace("FOLDER", str(tmp_path)).split()])
    with contextlib.suppress(SystemExit):
        runpy.run_module(f"scripts.bench.{name}", run_name="__main__")
    check(json.loads((tmp_path / "report.json").read_text()))
    assert "|" in capsys.readouterr().out or name == "balance"
