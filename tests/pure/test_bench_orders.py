"""The comparison of orders in its reduced form: its figures are there, and no order is faster than greedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_epp.planner.schedules import SCHEDULES
from scripts.bench.orders.bench import TIE, main
from scripts.bench.orders.page import CLAIMS, claims

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def test_the_page_of_schedules_has_what_papers_claim_and_what_ours_do_now():
    assert set(CLAIMS) == {name for name, schedule in SCHEDULES.items() if schedule.order is not None}
    assert claims() in PAGE.read_text()


def test_no_order_is_faster_than_greedy_with_its_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--reduced", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["order"] for row in rows] == ["interleaved, 4", "zb-v"]
    assert all(row["ratio"] == row["makespan_us"] / row["greedy_us"] >= 1 - TIE for row in rows)
    assert "faster than greedy" not in capsys.readouterr().out
