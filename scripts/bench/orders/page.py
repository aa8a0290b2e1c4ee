"""Writes the tables of docs/schedules.md: claims of papers and what our versions do, and a comparison on three batches.

python -m scripts.bench.orders.page                    the claims
python -m scripts.bench.orders.page FILE --pictures    and what `python -m scripts.bench.orders --json FILE` wrote
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_epp.plan.planners import PLANNERS
from megatron_epp.tools.report.gantt import side_by_side
from scripts.bench.orders.orders import draw
from scripts.bench.orders.unit import Unit, fewest
from scripts.tables import table, with_tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "schedules.md"
RANKS, MICROBATCHES = 8, 32
DRAWN_RANKS, DRAWN_MICROBATCHES = 4, 8
CLAIMS: dict[str, tuple[str, float | None, str, float | None]] = {
    "gpipe": ("`3 (p-1)`", 21, "`m`", 32),
    "1f1b-sliced": ("`3 (p-1)`", 21, "`p`", 8),
    "terapipe": ("`3 (p-1) / n`, for n = 4 slices", 5.25, "none", None),
    "kfkb": ("`3 (p-1)`", 21, "`k p`, for k = 1", 8),
    "interleaved": ("`3 (p-1) / v`", 10.5, "`p + (p-1) / v`", 11.5),
    "breadth-first": ("`3 (p-1) / v`", 10.5, "`m`", 32),
    "zb-h1": ("`p-1`", 7, "`p`", 8),
    "zb-h2": ("0 between a rank's ends", None, "`2p-1`", 15),
    "zb-v": ("0 between a rank's ends; its authors' order `(p-1) / 2`", 3.5, "`p`", 8),
    "v-min": ("`2 (p-1)`", 14, "`p/3` and a constant", 8 / 3),
    "v-half": ("`1.5 (p-1)`", 10.5, "`p/2` and a constant", 4),
    "dualpipe-v": ("`p-1`, if F and B do not overlap", 7, "`p + 1/2`", 8.5),
    "stp": ("`(p-1) / 2`, without exchange", 3.5, "`3 p / 2`", 12),
    "hanayo": ("none for more than `p`", None, "none", None),
    "helixpipe": ("two folds: at most `6 (p-1) (t_pre + t_post)`", 10.5, "`m`", 32),
    "slimpipe": ("none stated for this order", None, "with n slices `1 + 2 (p-1) / (n v)`", 1 + 14 / 32),
    "chronos": ("none in its abstract", None, "none in its abstract", None),
    "pipeoffload": ("none in its abstract", None, "below a half, if a half is offloaded", None),
    "sppo": ("`3 (p-1) / n`, for n = 4 slices", 5.25, "none without its copies", None),
    "dynapipe": ("`3 (p-1)`", 21, "the cap", None),
}
"""By schedule: bubble and memory as the paper states them, each with its value for `RANKS` and `MICROBATCHES`."""
OWN_CHUNKS = (
    ("`seq1f1b`", "2406.03488", "`3 (p-1) / n` = 5.25", "5.25", "`(p-1+n) / n` = 2.75", "2.75"),
    ("`infinipipe`", "2509.21275", "`p-1` mean chunks = 5.25", "5.25", "`(p-1+n) / n` = 2.75", "2.75"),
    (
        "`chunkflow`",
        "2503.02356",
        "its example: 47.8 % with K = 2, 54.1 % with K = 1",
        "42.9 %, 50 %",
        "`K` chunks of a sequence",
        "`K`, and layer inputs",
    ),
    ("`flexsp`", "2412.01523", "none: the slowest group as early as possible", "that", "none", "none"),
    (
        "`milp`",
        "OptPipe, 2510.05186",
        "up to half of other schedules' with their memory",
        "5.5; with copies 1.5",
        "the cap",
        "2",
    ),
)
"""Rows of planners that have no order for a given chunk table: schedule, source, and bubble and memory, claimed and here."""
SLICES = {"slimpipe": 16, "terapipe": 4, "sppo": 4}
"""Slices of every sequence in the table of claims; 1 for the others."""


def claims() -> str:
    """Format the table of what papers claim and what our versions do."""
    rows = []
    for name, (bubble, waits, memory, held) in CLAIMS.items():
        unit = Unit(name, RANKS, MICROBATCHES, SLICES.get(name, 1))
        decisions = unit.of_paper()
        said = [bubble if waits is None else f"{bubble} = {waits:g}", memory if held is None else f"{memory} = {held:.3g}"]
        source = PLANNERS.entries()[name].source
        rows.append([f"`{name}`", source, said[0], f"{unit.waits(decisions):g}", said[1], f"{unit.alive(decisions):.3g}"])
    rows.extend(map(list, OWN_CHUNKS))
    rows.append(["`plan --layout auto`", "AdaPtis, 2509.23722", "none for equal layers", "below", "none", "below"])
    return table(["schedule", "source", "bubble, claimed", "here", "memory, claimed", "here"], rows)


def gallery(rows: Sequence[dict[str, Any]]) -> str:
    """Format the makespans of all orders over greedy's, with a column for every batch and cap; the fastest are bold."""
    cases = list(dict.fromkeys((row["batch"], row["cap_gib"]) for row in rows))
    ratios = {(row["order"], row["batch"], row["cap_gib"]): row["ratio"] for row in rows}
    took = {case: [row["makespan_us"] for row in rows if (row["batch"], row["cap_gib"]) == case] for case in cases}
    best = {case: min(filter(None, all_us), default=0.0) for case, all_us in took.items()}
    fast = {
        (row["order"], row["batch"], row["cap_gib"])
        for row in rows
        if row["makespan_us"] is not None and row["makespan_us"] <= 1.005 * best[row["batch"], row["cap_gib"]]
    }
    lines = []
    for name in dict.fromkeys(row["order"] for row in rows):
        cells = []
        for case in cases:
            ratio = ratios.get((name, *case))
            text = "-" if ratio is None else f"{ratio:.3f}"
            cells.append(f"**{text}**" if (name, *case) in fast else text)
        lines.append([f"`{name}`", *cells])
    return table(["schedule", *(f"{batch}, {cap} GiB" for batch, cap in cases)], lines)


def picture(path: Path) -> None:
    """Draw every schedule for few microbatches, one below the other."""
    sizes = {name: 4 if name in SLICES else 1 for name in CLAIMS}
    count = {name: max(DRAWN_MICROBATCHES, fewest(name, DRAWN_RANKS)) for name in sizes}
    plans = [(name, Unit(name, DRAWN_RANKS, count[name], slices).plan()) for name, slices in sizes.items()]
    side_by_side(plans).savefig(path, dpi=80)


def page(text: str, rows: Sequence[dict[str, Any]]) -> str:
    """Return the page with its tables as they are now.

    Args:
        rows: of `python -m scripts.bench.orders`, which take hours; none leave the tables of plans as they are.
    """
    return with_tables(text, [claims(), *([gallery(rows)] if rows else [])])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?", metavar="FILE", help="what `scripts.bench.orders --json FILE` wrote")
    parser.add_argument("--pictures", action="store_true", help="draw the pictures, too")
    args = parser.parse_args(argv)
    rows = json.loads(args.rows.read_text())["rows"] if args.rows else []
    PAGE.write_text(page(PAGE.read_text(), rows))
    if args.pictures:
        picture(PAGE.with_suffix(".png"))
        draw(PAGE.parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
