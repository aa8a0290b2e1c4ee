"""The comparison of orders in its reduced form: its figures are there, and no order is faster than greedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_epp.planner.registry import PLANNERS
from scripts.bench.orders import random_batches
from scripts.bench.orders.orders import CASES, DRAWN, ORDERS, TIE, main
from scripts.bench.orders.page import CLAIMS, bubbles_and_peaks, claims, with_tables
from tests.support.seeds import some_by_default

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def test_the_page_of_schedules_has_what_papers_claim_and_what_ours_do_now():
    orders = {name for name, entry in PLANNERS.entries().items() if entry.fixed is not None}
    assert set(CLAIMS) == orders, "`CLAIMS` of scripts/bench/orders/page.py has a row for every order"
    assert claims() in PAGE.read_text()


def test_the_page_of_schedules_has_the_words_of_the_script_that_writes_it():
    """All but the figures of plans, which take long: their tables are taken from the page, and only their names looked at."""
    page = PAGE.read_text()
    planned = page[page.index("## On three batches") : page.index("## Planned, not run")]
    makespans, *peaks = re.findall(r"(?m)(?:^\|.*\n)+", planned)
    assert page == with_tables(makespans.rstrip(), "\n".join(peaks).rstrip(), PAGE.with_suffix(".png").name, DRAWN)
    cases = [f"{case.name}, {case.cap_gib} GiB" for case in CASES]
    assert makespans.splitlines()[0] == "| " + " | ".join(["schedule", *cases]) + " |"
    for table in (makespans, *peaks):
        names = re.findall(r"(?m)^\| `(.+?)` \|", table)
        assert set(names) == set(ORDERS)
        assert len(names) == len(ORDERS)


def test_no_order_is_faster_than_greedy_with_its_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--reduced", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["order"] for row in rows] == ["interleaved, 4", "zb-v"]
    assert all(row["ratio"] == row["makespan_us"] / row["greedy_us"] >= 1 - TIE for row in rows)
    assert "faster than greedy" not in capsys.readouterr().out
    for row in rows:
        assert all(0 < row[f"{who}bubble"] < 1 and 0 < row[f"{who}peak_gib"] <= row["cap_gib"] for who in ("", "greedy_"))
    page = tmp_path / "page.md"
    assert main(["--page", str(page), "--rows", str(tmp_path / "rows.json")]) == 0
    assert bubbles_and_peaks(rows) in page.read_text()
    assert claims() in page.read_text()


def test_the_page_has_bubble_and_peak_of_every_order_by_batch_and_cap():
    none = {"bubble": None, "peak_gib": None, "greedy_bubble": None, "greedy_peak_gib": None}
    found = {"bubble": 0.125, "peak_gib": 40.25, "greedy_bubble": 0.1, "greedy_peak_gib": 39.0}
    rows = [
        {"batch": "A", "cap_gib": cap, "order": order} | figures
        for cap, order, figures in [(80, "gpipe", found), (80, "zb-v", none), (40, "gpipe", none), (40, "zb-v", found)]
    ]
    assert bubbles_and_peaks(rows).splitlines() == [
        "| A | 80 GiB | 40 GiB |",
        "| --- | --- | --- |",
        "| the default planner | 10.0 %, 39.0 | no plan |",
        "| `gpipe` | 12.5 %, 40.2 | no plan |",
        "| `zb-v` | no plan | 12.5 %, 40.2 |",
    ]


def test_random_batches_are_planned_once_and_wins_and_losses_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(random_batches, "ORDERS", {"interleaved": ("interleaved", 2), "gpipe": ("gpipe", 1)})
    arguments = ["--seeds", "2:3", "-o", str(tmp_path / "found.jsonl")]
    assert random_batches.main(arguments) == 0
    first = (tmp_path / "found.jsonl").read_text()
    (one,) = map(json.loads, first.splitlines())
    assert all(row["makespan_us"] >= (1 - TIE) * row["greedy_us"] > 0 for row in one["orders"].values())
    slow = {"makespan_us": 9.0, "greedy_us": 10.0}
    (tmp_path / "found.jsonl").write_text(first + json.dumps(one | {"seed": 3, "orders": {"gpipe": slow}}) + "\n")
    capsys.readouterr()
    assert random_batches.main([*arguments[:1], "2:4", *arguments[2:]]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in printed[1:3]] == [["interleaved", "0", "1", "0"], ["gpipe", "1", "0", "1"]]
    assert printed[3].startswith("seed 3")
    assert printed[3].endswith("gpipe 0.900")


ONCE_FASTER = [
    (0, "interleaved, 4"),
    (91, "hanayo"),
    (48, "interleaved, 4"),
    (97, "slimpipe"),
    (29, "slimpipe"),
    (71, "hanayo"),
]


@some_by_default(("seed", "order"), ONCE_FASTER, 2)
def test_greedy_has_learnt_from_orders_that_were_faster(seed: int, order: str):
    """Any number of coarse chunks, one warm-up for all ranks, narrow windows for grains that are nearly the best, and slices of
    equal length.
    """
    row = random_batches.ratios(seed, [order])["orders"][order]
    assert row["makespan_us"] >= (1 - TIE) * row["greedy_us"] > 0
