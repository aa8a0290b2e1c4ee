"""The report of `bench/planner` in Markdown. Every number comes from the rows of its cases."""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence

from scripts.bench.frame import Figures, geometric_mean
from scripts.bench.planner.fixed import FIXED
from scripts.bench.planner.runs import BATCHES
from scripts.tables import table

SPEED, TUNED, RUNS = "speed", "tuned", "runs"
"""Parts of the benchmark, with which the names of their cases begin."""
TIE = 0.005
"""Makespans closer than this share count as equal."""
WORTH_EXPLAINING = 0.05
FEATURES = (
    """\"All features\": weight gradients as actions of their own, and offload to the host (`--split-weight --offload`)."""
)


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    speed, tuned, runs = ([row for row in rows if row["case"].startswith(part)] for part in (SPEED, TUNED, RUNS))
    parts = [_speed(speed)] if speed else []
    parts += [FEATURES] if tuned or runs else []
    parts += [f"{ABOUT_TUNED}\n\n{_ratios(tuned)}", f"{_gaps(tuned)}\n\n{_tuned(tuned)}"] if tuned else []
    parts += [_runs(runs)] if runs else []
    return "\n\n".join(parts)


def against(rows: Sequence[Figures], name: str, all_features: bool = False) -> Figures:
    """Geometric mean of their makespan over ours (with all features), where both have a plan; and over our plan's lower bound,
    which is the most that any order and recompute of our chunks could win.
    """
    ours = [(row, row.get("all_features") if all_features else row if "makespan_us" in row else None) for row in rows]
    theirs_us = [row["rivals"][name]["makespan_us"] for row in rows]
    both = [(us / own["makespan_us"], row, own) for us, (row, own) in zip(theirs_us, ours, strict=True) if us and own]
    ratios = [ratio for ratio, _, _ in both]
    return {
        "both_have_a_plan": len(both),
        "only_we_have_one": sum(own is not None and us is None for us, (_, own) in zip(theirs_us, ours, strict=True)),
        "only_they_have_one": sum(own is None and us is not None for us, (_, own) in zip(theirs_us, ours, strict=True)),
        "geometric_mean": geometric_mean(ratios),
        "where_memory_binds": geometric_mean([ratio for ratio, row, _ in both if row["recompute_share"] > 0]),
        "over_bound": geometric_mean([ratio * (1 + own["gap"]) for ratio, _, own in both if "gap" in own]),
        "least": min(ratios, default=None),
        "most": max(ratios, default=None),
        "ties": [row["case"] for ratio, row, _ in both if abs(ratio - 1) <= TIE],
        "they_win": [f"{row['case']}: {ratio:.3f}" for ratio, row, _ in both if ratio < 1 - TIE],
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speed(rows: Sequence[Figures]) -> str:
    header = ["sequences", "stages", "chunks", "planning (ms)", "us for each chunk and stage"]
    cells = []
    for r in rows:
        each = f"{1e3 * r['planning_ms'] / (r['chunks'] * r['stages']):.0f}" if r["chunks"] else ""
        size = [f"{r['sequences']:,}", str(r["stages"]), str(r["chunks"] or "no plan")]
        cells.append([*size, f"{r['planning_ms']:.0f}", each])
    return f"## Speed\n\nProcessor time on one core, start-up excluded.\n\n{table(header, cells)}"


ABOUT_TUNED = """## Against other planners, tuned for every batch

Same costs, same caps; geometric means over the cases that both can plan. Chunk size, recompute and what else a planner has are
the best for each batch: more than a real run of stock 1F1B, Seq1F1B or ChunkFlow can have, which fixes them in its launch flags
(see the next table). InfiniPipe plans every batch in practice too."""

ABOUT_RUNS = """## Against other planners, as runs use them

One chunk size and one uniform recompute (ChunkFlow: one K) for all {batches} batches of a run: the fastest setting of those
that fit every batch, and besides a batch with a sequence as long as may come (the context, or the longest of the corpus). Total
time of the batches. The pipelines are the same for all planners and have room for that longest sequence."""


def _runs(rows: Sequence[Figures]) -> str:
    header = ["lengths", "context", "stages", "model", "TP x CP", "cap (GB)", "tokens", "all features: faster by", *FIXED]
    cells = []
    for r in rows:
        ours_us = r.get("makespan_us")
        features = "no plan" if ours_us is None else _percent(ours_us / r["all_features"]["makespan_us"] - 1)
        cells.append([*_case(r), features, *(_fixed(r["rivals"][name], ours_us) for name in FIXED)])
    about = ABOUT_RUNS.format(batches=BATCHES)
    return f"{about}\n\n{_ratios(rows)}\n\nTheir time over ours, and the setting:\n\n{table(header, cells)}"


def _fixed(rival: Figures, ours_us: float | None) -> str:
    if rival["makespan_us"] is None:
        return "does not fit"
    names = {"chunk_tokens": "chunks of {:,}", "recompute": "{} layers recompute", "retain": "K = {}"}
    setting = ", ".join(text.format(rival[key]) for key, text in names.items() if rival[key] is not None)
    return f"{_ratio(rival['makespan_us'] / ours_us) if ours_us else '-'} ({setting})"


def _ratios(rows: Sequence[Figures]) -> str:
    cells, said = [], []
    for name in rows[0]["rivals"]:
        r, more = against(rows, name), against(rows, name, all_features=True)
        means = [_ratio(r[key]) for key in ("geometric_mean", "where_memory_binds", "over_bound")]
        counts = [r[key] for key in ("both_have_a_plan", "only_we_have_one", "only_they_have_one")]
        wins = len(r["ties"]), len(r["they_win"]), len(more["they_win"])
        span = f"{_ratio(r['least'])} to {_ratio(r['most'])}"
        cells.append([name, *means, span, _ratio(more["geometric_mean"]), *counts, *wins])
        for what, cases in (("ties with", r["ties"]), ("loses to", r["they_win"])):
            said += [f"Ours {what} {name}: {'; '.join(cases)}."] if cases else []
    header = ["planner", "their makespan / ours", "where memory binds", "their makespan / our bound", "range"]
    header += ["with all features", "cases", "only we fit", "only they fit", "ties (0.5 %)", "they win"]
    return "\n\n".join([table([*header, "they win (all features)"], cells), *said])


def _case(r: Figures) -> list[str]:
    case = [r["lengths"], f"{r['context'] // 1024}K", str(r["stages"]), r["model"]]
    return [*case, f"{r['tensor_parallel']} x {r['context_parallel']}", str(r["cap_gb"]), f"{r['tokens']:,}"]


def _tuned(rows: Sequence[Figures]) -> str:
    header = ["lengths", "context", "stages", "model", "TP x CP", "cap (GB)", "tokens", "chunks", "gap", "recompute", "idle"]
    header += ["planning (ms)", "all features: faster by", "gap", "uses", "planning (ms)", "why the gap"]
    cells = []
    for r in rows:
        if "gap" not in r:
            cells.append([*_case(r), "", "no plan", *[""] * 7, "the cap is below the least that any plan takes"])
            continue
        figures = [r["chunks"], *(_percent(r[key]) for key in ("gap", "recompute_share", "idle_share"))]
        more = r["all_features"]
        uses = ", ".join(word for word, used in (("W", more["splits_weight"]), ("offload", more["offloads"])) if used)
        features = [_percent(r["makespan_us"] / more["makespan_us"] - 1), _percent(more["gap"]), uses or "none"]
        times = [f"{own['planning_ms']:.0f}" for own in (r, more)]
        cells.append([*_case(r), *figures, times[0], *features, times[1], _explained(r)])
    return table(header, cells)


def _gaps(rows: Sequence[Figures]) -> str:
    planned = [r for r in rows if "gap" in r]
    if not planned:
        return f"## Gap to the lower bound\n\nNone of {len(rows)} cases has a plan."

    def spread(of: Sequence[Figures]) -> str:
        gaps = [r["gap"] for r in of]
        within = _percent(sum(gap <= WORTH_EXPLAINING for gap in gaps) / len(gaps))
        return f"median {_percent(statistics.median(gaps))}, worst {_percent(max(gaps))}, at most 5 % in {within} of them"

    more = [r["all_features"] for r in planned]
    faster = geometric_mean([r["makespan_us"] / other["makespan_us"] for r, other in zip(planned, more, strict=True)])
    return (
        f"## Gap to the lower bound\n\n{len(planned)} of {len(rows)} cases have a plan. Gap: {spread(planned)}. With "
        f"all features: {spread(more)}, and {_percent((faster or 1.0) - 1)} faster plans (geometric mean). The bound is that "
        "of the chosen chunks. Recompute and idle are shares of the makespan on the busiest rank; idle includes fill and "
        "drain. A stage has the fewest ranks (TP x CP) that leave room under its cap."
    )


def _explained(r: Figures) -> str:
    """Why the gap is as large as it is, with what it consists of."""
    if r["gap"] <= WORTH_EXPLAINING:
        return ""
    parts = f"{_percent(r['gap_of_recompute'])} recompute, {_percent(r['gap_of_waiting'])} waiting"
    return f"{r['why']} ({parts})"
