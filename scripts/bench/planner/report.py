"""The report of `bench/planner` in Markdown. Every number comes from the rows of its cases, which have more of each case."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence

from scripts.bench.frame import Figures, geometric_mean
from scripts.bench.planner.runs import BATCHES
from scripts.tables import table

SPEED, TUNED, RUNS = "speed", "tuned", "runs"
"""Parts of the benchmark, with which the names of their cases begin."""
TIE = 0.005
"""Makespans closer than this share count as equal."""
ABOUT_TUNED = """## Against other planners, tuned for every batch

Same costs, same caps; geometric means over the cases that both can plan. Chunk size, recompute and what else a planner has are
the best for each batch: more than a real run of stock 1F1B, Seq1F1B or ChunkFlow can have, which fixes them in its launch flags
(see the next table). InfiniPipe plans every batch in practice too."""
ABOUT_RUNS = f"""## Against other planners, as runs use them

One chunk size and one uniform recompute (ChunkFlow: one K) for all {BATCHES} batches of a run: the fastest setting of those
that fit every batch, and besides a batch with a sequence as long as may come (the context, or the longest of the corpus). Total
time of the batches. The pipelines are the same for all planners and have room for that longest sequence."""


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    speed, tuned, runs = ([row for row in rows if row["case"].startswith(part)] for part in (SPEED, TUNED, RUNS))
    parts = [_speed(speed)] if speed else []
    parts += [f"{ABOUT_TUNED}\n\n{_ratios(tuned)}", _gaps(tuned)] if tuned else []
    parts += [f"{ABOUT_RUNS}\n\n{_ratios(runs)}"] if runs else []
    return "\n\n".join(parts)


def against(rows: Sequence[Figures], name: str) -> Figures:
    """Geometric mean of their makespan over ours, where both have a plan, and where memory asks for recompute."""
    ours_us = [row.get("makespan_us") for row in rows]
    theirs_us = [row["rivals"][name]["makespan_us"] for row in rows]
    pairs = list(zip(theirs_us, ours_us, rows, strict=True))
    both = [(theirs / ours, row) for theirs, ours, row in pairs if theirs and ours]
    return {
        "both_have_a_plan": len(both),
        "only_we_have_one": sum(ours is not None and theirs is None for theirs, ours, _ in pairs),
        "only_they_have_one": sum(ours is None and theirs is not None for theirs, ours, _ in pairs),
        "geometric_mean": geometric_mean([ratio for ratio, _ in both]),
        "where_memory_binds": geometric_mean([ratio for ratio, row in both if row["recompute_share"] > 0]),
        "they_win": [f"{row['case']}: {ratio:.3f}" for ratio, row in both if ratio < 1 - TIE],
    }


def _speed(rows: Sequence[Figures]) -> str:
    cells = [[r["sequences"], r["stages"], r["chunks"] or "no plan", f"{r['planning_ms']:.0f}"] for r in rows]
    figures = table(["sequences", "stages", "chunks", "planning (ms)"], cells)
    return f"## Speed\n\nProcessor time on one core, start-up excluded.\n\n{figures}"


def _ratios(rows: Sequence[Figures]) -> str:
    cells, wins = [], []
    for name in rows[0]["rivals"]:
        figures = against(rows, name)
        means = [figures[key] for key in ("geometric_mean", "where_memory_binds")]
        counts = [figures[key] for key in ("both_have_a_plan", "only_we_have_one", "only_they_have_one")]
        cells.append([name, *("no plan" if mean is None else f"{mean:.2f}" for mean in means), *counts])
        wins += [f"{name} is faster: {'; '.join(figures['they_win'])}."] if figures["they_win"] else []
    header = ["planner", "their makespan / ours", "where memory binds", "cases", "only we fit", "only they fit"]
    return "\n\n".join([table(header, cells), *wins])


def _gaps(rows: Sequence[Figures]) -> str:
    gaps = [row["gap"] for row in rows if "gap" in row]
    if not gaps:
        return f"None of {len(rows)} cases has a plan."
    spread = f"median {statistics.median(gaps):.1%}, worst {max(gaps):.1%}"
    return f"{len(gaps)} of {len(rows)} cases have a plan. Above the lower bound of their chunks: {spread}."
