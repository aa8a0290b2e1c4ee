"""The comparison of orders in its reduced form: its figures are there, and no order is faster than greedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench.orders.bench import TIE, main


def test_no_order_is_faster_than_greedy_with_its_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--reduced", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["order"] for row in rows] == ["interleaved, 4", "zb-v"]
    assert all(row["ratio"] == row["makespan_us"] / row["greedy_us"] >= 1 - TIE for row in rows)
    assert "faster than greedy" not in capsys.readouterr().out
