"""The report of `bench/planner` in Markdown. Every number comes from the report's JSON."""

from __future__ import annotations

from typing import Any

WORTH_EXPLAINING = 0.05
FEATURES = """\"All features\": weight gradients as actions of their own, and offload to the host (`--split-weight --offload`).
"""


def markdown(report: dict[str, Any]) -> str:
    parts = [f"# The planner, measured\n\n{report['machine']}, Python {report['python']}, {report['minutes']:.1f} minutes."]
    if "speed" in report:
        parts.append(_speed(report["speed"]))
    if "large" in report or "runs" in report:
        parts.append(FEATURES)
    if "large" in report:
        parts.append(_against(report["large"]))
        parts.append(_large(report["large"]))
    if "runs" in report:
        parts.append(_runs(report["runs"]))
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speed(rows: list[dict[str, Any]]) -> str:
    header = ["sequences", "stages", "chunks", "planning (ms)", "us for each chunk and stage"]
    cells = []
    for r in rows:
        each = f"{1e3 * r['planning_ms'] / (r['chunks'] * r['stages']):.0f}" if r["chunks"] else ""
        size = [f"{r['sequences']:,}", str(r["stages"]), str(r["chunks"] or "no plan")]
        cells.append([*size, f"{r['planning_ms']:.0f}", each])
    return f"## Speed\n\nProcessor time on one core, start-up excluded.\n\n{table(header, cells)}"


TUNED = """## Against other planners, tuned for every batch

Same costs, same caps; geometric means over the cases that both can plan. Chunk size, recompute and what else a planner has are
the best for each batch: more than a real run of stock 1F1B, Seq1F1B or ChunkFlow can have, which fixes them in its launch flags
(see the next table). InfiniPipe plans every batch in practice too."""

FIXED = """## Against other planners, as runs use them

One chunk size and one uniform recompute (ChunkFlow: one K) for all {batches} batches of a run: the fastest setting of those
that fit every batch, and besides a batch with a sequence as long as may come (the context, or the longest of the corpus). Total
time of the batches. The pipelines are the same for all planners and have room for that longest sequence."""


def _against(totals: dict[str, Any]) -> str:
    return f"{TUNED}\n\n{_ratios(totals)}"


def _runs(totals: dict[str, Any]) -> str:
    header = ["lengths", "context", "stages", "model", "TP x CP", "cap (GB)", "tokens", "all features: faster by"]
    names = list(totals["against"])
    rows = []
    for r in totals["rows"]:
        ours_us = r.get("makespan_us")
        features = "no plan" if ours_us is None else _percent(ours_us / r["all_features"]["makespan_us"] - 1)
        rows.append([*_case(r), features, *(_fixed(r["rivals"][name], ours_us) for name in names)])
    settings = table([*header, *names], rows)
    return f"{FIXED.format(**totals)}\n\n{_ratios(totals)}\n\nTheir time over ours, and the setting:\n\n{settings}"


def _fixed(rival: dict[str, Any], ours_us: float | None) -> str:
    if rival["makespan_us"] is None:
        return "does not fit"
    names = {"chunk_tokens": "chunks of {:,}", "recompute": "{} layers recompute", "retain": "K = {}"}
    setting = ", ".join(text.format(rival[key]) for key, text in names.items() if rival[key] is not None)
    return f"{_ratio(rival['makespan_us'] / ours_us) if ours_us else '-'} ({setting})"


def _ratios(totals: dict[str, Any]) -> str:
    rows = []
    for name, r in totals["against"].items():
        more = totals["against_all_features"][name]
        rows.append(
            [
                name,
                _ratio(r["geometric_mean"]),
                _ratio(r["geometric_mean_where_memory_binds"]),
                _ratio(r["geometric_mean_over_bound"]),
                f"{_ratio(r['least'])} to {_ratio(r['most'])}",
                _ratio(more["geometric_mean"]),
                str(r["both_have_a_plan"]),
                str(r["only_we_have_one"]),
                str(r["only_they_have_one"]),
                str(len(r["ties"])),
                str(len(r["they_win"])),
                str(len(more["they_win"])),
            ]
        )
    header = [
        "planner",
        "their makespan / ours",
        "where memory binds",
        "their makespan / our bound",
        "range",
        "with all features",
    ]
    text = table(
        [*header, "cases", "only we fit", "only they fit", "ties (0.5 %)", "they win", "they win (all features)"], rows
    )
    for name, r in totals["against"].items():
        for what, cases in (("ties with", r["ties"]), ("loses to", r["they_win"])):
            if cases:
                text += f"\n\nOurs {what} {name}: " + "; ".join(cases) + "."
    return text


def _case(r: dict[str, Any]) -> list[str]:
    case = [r["lengths"], f"{r['context'] // 1024}K", str(r["stages"]), r["model"]]
    return [*case, f"{r['tensor_parallel']} x {r['context_parallel']}", str(r["cap_gb"]), f"{r['tokens']:,}"]


def _large(totals: dict[str, Any]) -> str:
    header = ["lengths", "context", "stages", "model", "TP x CP", "cap (GB)", "tokens", "chunks", "gap", "recompute", "idle"]
    header += ["planning (ms)", "all features: faster by", "gap", "uses", "planning (ms)", "why the gap"]
    rows = []
    for r in totals["rows"]:
        if "gap" not in r:
            rows.append([*_case(r), "", "no plan", *[""] * 7, "the cap is below the least that any plan takes"])
            continue
        figures = [str(r["chunks"]), _percent(r["gap"]), _percent(r["recompute_share"]), _percent(r["idle_share"])]
        more = r["all_features"]
        uses = ", ".join(word for word, used in (("W", more["splits_weight"]), ("offload", more["offloads"])) if used)
        features = [_percent(r["makespan_us"] / more["makespan_us"] - 1), _percent(more["gap"]), uses or "none"]
        times = [f"{figures['planning_ms']:.0f}" for figures in (r, more)]
        rows.append([*_case(r), *figures, times[0], *features, times[1], _explained(r)])
    return f"{_gaps(totals)}\n\n{table(header, rows)}"


def _gaps(totals: dict[str, Any]) -> str:
    more = totals["all_features"]

    def spread(gaps: dict[str, Any]) -> str:
        within = _percent(gaps["share_within_5_percent"])
        return f"median {_percent(gaps['median_gap'])}, worst {_percent(gaps['worst_gap'])}, at most 5 % in {within} of them"

    faster = _percent((more["over_default"] or 1.0) - 1)
    return (
        f"## Gap to the lower bound\n\n{totals['planned']} of {totals['cases']} cases have a plan. Gap: {spread(totals)}. With "
        f"all features: {spread(more)}, and {faster} faster plans (geometric mean). The bound is that of the chosen chunks. "
        "Recompute and idle are shares of the makespan on the busiest rank; idle includes fill and drain. A stage has the "
        "fewest ranks (TP x CP) that leave room under its cap."
    )


def _explained(r: dict[str, Any]) -> str:
    """Why the gap is as large as it is, with what it consists of."""
    if r["gap"] <= WORTH_EXPLAINING:
        return ""
    parts = f"{_percent(r['gap_of_recompute'])} recompute, {_percent(r['gap_of_waiting'])} waiting"
    return f"{r['why']} ({parts})"
