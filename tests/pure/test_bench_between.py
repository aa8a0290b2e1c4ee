"""The benchmark of what a rank does between iterations runs from end to end."""

from __future__ import annotations

import sys

import pytest

from scripts.bench import between


def test_it_prints_a_row_for_every_way_to_get_a_plan_and_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["between", "--sequences", "4", "--stages", "2"])
    between.main()
    head, names, *rows = capsys.readouterr().out.splitlines()
    assert " chunks, 2 stages; a message of " in head
    assert names.split() == ["CPU", "ms", "least", "most"]
    assert [row.split("  ")[0] for row in rows] == [
        "plan and this rank's actions, from a plan file",
        "the same, from the planning process",
        "report, digest computed",
        "report, digest from the planning process",
    ]
    assert all(float(row.split()[-2]) <= float(row.split()[-3]) <= float(row.split()[-1]) for row in rows)
