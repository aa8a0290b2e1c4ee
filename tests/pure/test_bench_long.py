"""The benchmark of one long sequence, on a small case: its figures are there, and every lever helps or does nothing."""

import json
import sys

import pytest

from scripts.bench.long import bench as bench_long


@pytest.mark.slow  # plans two contexts with every lever; test_bench_planner has a reduced benchmark of the same kind
def test_more_levers_fit_more_and_are_no_slower(tmp_path, monkeypatch):
    flags = ["--stages", "4", "--cap-gb", "20", "--contexts", "32", "64", "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_long.py", *flags])
    bench_long.main()
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    for row in rows.values():
        times = [found["makespan_s"] if found else float("inf") for found in (row[name] for name in bench_long.VARIANTS)]
        assert times == sorted(times, reverse=True)
    assert rows["64"]["offload, KV offload"]["kv_offload_stages"] > 0
    assert rows["64"]["recompute"] is None
    assert "| 64K | no plan |" in (tmp_path / "report.md").read_text()
