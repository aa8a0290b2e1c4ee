"""The page of schedules has what the comparison of orders says, and greedy what it has learnt from them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_epp.planner.registry import PLANNERS
from scripts.bench.orders import random_batches
from scripts.bench.orders.orders import CASES, ORDERS, TIE
from scripts.bench.orders.page import CLAIMS, claims
from scripts.tables import table, with_tables
from tests.support.seeds import some_by_default

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def test_the_page_of_schedules_has_what_papers_claim_and_what_ours_do_now():
    orders = {name for name, entry in PLANNERS.entries().items() if entry.fixed is not None}
    assert set(CLAIMS) == orders, "`CLAIMS` of scripts/bench/orders/page.py has a row for every order"
    assert claims() in PAGE.read_text()


def test_the_table_of_plans_has_every_case_and_order():
    """Their figures take long, so only names are looked at."""
    page = PAGE.read_text()
    planned = page[page.index("## On three batches") : page.index("## Planned, not run")]
    (makespans,) = re.findall(r"(?m)(?:^\|.*\n)+", planned)
    cases = [f"{case.name}, {case.cap_gib} GiB" for case in CASES]
    assert makespans.splitlines()[0] == "| " + " | ".join(["schedule", *cases]) + " |"
    assert sorted(re.findall(r"(?m)^\| `(.+?)` \|", makespans)) == sorted(ORDERS)


def test_a_page_has_new_tables_in_place_of_those_with_their_titles():
    old, new = table(["a", "b"], [[1, 2]]), table(["a", "b"], [[1234, "x"]])
    assert with_tables(f"words\n\n{old}\n\nmore\n", [new]) == "words\n\n| a | b |\n| --- | --- |\n| 1,234 | x |\n\nmore\n"
    with pytest.raises(ValueError, match="titles"):
        with_tables(f"{old}\n\n{old}\n", [new])


def test_random_batches_are_planned_once_and_wins_and_losses_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(random_batches, "ORDERS", {"interleaved": ("interleaved", 2), "gpipe": ("gpipe", 1)})
    file = tmp_path / "found.json"
    assert random_batches.BENCH.main(["--seeds", "2:3", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    (one,) = report["rows"]
    assert all(row["makespan_us"] >= (1 - TIE) * row["greedy_us"] > 0 for row in one["orders"].values())
    slow = {"makespan_us": 9.0, "greedy_us": 10.0}
    other = one | {"case": "3", "seed": 3, "orders": {"gpipe": slow}}
    file.write_text(json.dumps(report | {"rows": [one, other]}))
    capsys.readouterr()
    assert random_batches.BENCH.main(["--seeds", "2:4", "--json", str(file)]) == 0
    *_, interleaved, gpipe, win = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:4] for line in (interleaved, gpipe)] == [
        ["| interleaved", "0", "1", "0"],
        ["| gpipe", "1", "0", "1"],
    ]
    assert win.startswith("seed 3")
    assert win.endswith("gpipe 0.900")


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
