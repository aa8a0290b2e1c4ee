"""The benchmark of what a rank does between iterations runs from end to end."""

from __future__ import annotations

import sys

import pytest

from scripts.bench.between import bench


@pytest.mark.slow  # its ranks import torch, each anew
def test_it_prints_a_row_for_every_way_to_get_a_plan_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["between", "--sequences", "4", "--stages", "2"])
    bench.main()
    plans, reports = capsys.readouterr().out.split("\n\n")
    head, names, *rows = plans.splitlines()
    assert " chunks, 2 stages; a message of " in head
    assert names.split() == ["CPU", "ms", "least", "most"]
    assert [row.split("  ")[0] for row in rows] == [
        "plan and this rank's actions, from a plan file",
        "the same, from the planning process",
        "measurement, digest computed",
        "the same, digest from the planning process",
        "comparison of a rank with its costs",
        "inputs of the last stage's rank, in a thread",
    ]
    assert all(float(row.split()[-2]) <= float(row.split()[-3]) <= float(row.split()[-1]) for row in rows)
    head, _, *rows = reports.splitlines()
    assert head == "reports of 2 ranks, CPU ms:"
    assert [row.split("  ")[0] for row in rows] == ["first", "in the middle", "last"]
