"""The report of `bench_planner.py` in Markdown. Every number comes from the report's JSON."""

from __future__ import annotations

from typing import Any

WORTH_EXPLAINING = 0.05


def markdown(report: dict[str, Any]) -> str:
    parts = [f"# The planner, measured\n\n{report['machine']}, Python {report['python']}, {report['minutes']:.1f} minutes."]
    if "speed" in report:
        parts.append(_speed(report["speed"]))
    if "small" in report:
        parts.append(_small(report["small"]))
    if "large" in report:
        parts.append(_against(report["large"]))
        parts.append(_large(report["large"]))
    return "\n\n".join(parts) + "\n"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _speed(rows: list[dict[str, Any]]) -> str:
    cells = [[f"{r['sequences']:,}", str(r["stages"]), str(r["chunks"] or "no plan"), f"{r['planning_ms']:.0f}"] for r in rows]
    return "## Speed\n\nProcessor time on one core, start-up excluded.\n\n" + table(
        ["sequences", "stages", "chunks", "planning (ms)"], cells
    )


def _small(found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"## Against the oracle\n\nNot measured: {found['skipped']}"
    return (
        "## Against the oracle\n\n"
        f"{found['cases']} random cases of up to 8 chunks under tight caps (chunks times stages at most "
        f"{found['most_chunks_times_stages']}); {found['compared']} compared, {found['proven_optimal']} of them solved to "
        f"proof in {found['time_limit_s']:.0f} s each.\n\n"
        + table(
            ["", "mean", "worst"],
            [
                ["gap to the best known", _percent(found["mean_gap"]), _percent(found["worst_gap"])],
                [
                    "gap to the oracle's proven bound",
                    _percent(found["mean_gap_to_proven_bound"]),
                    _percent(found["worst_gap_to_proven_bound"]),
                ],
            ],
        )
        + f"\n\nNo plan where the oracle has one: {found['infeasible_for_the_planner_alone']}. "
        f"No plan for either: {found['infeasible_for_both']}."
    )


def _against(found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            _ratio(r["geometric_mean"]),
            _ratio(r["geometric_mean_where_memory_binds"]),
            f"{_ratio(r['least'])} to {_ratio(r['most'])}",
            str(r["both_have_a_plan"]),
            str(r["only_we_have_one"]),
            str(r["only_they_have_one"]),
            str(len(r["ties"])),
            str(len(r["they_win"])),
        ]
        for name, r in found["against"].items()
    ]
    header = ["planner", "their makespan / ours", "where memory binds", "range", "cases", "only we fit", "only they fit"]
    text = "## Against other planners\n\nSame costs, same caps; geometric means over the cases that both can plan.\n\n"
    text += table([*header, "ties (0.5 %)", "they win"], rows)
    for name, r in found["against"].items():
        for what, cases in (("ties with", r["ties"]), ("loses to", r["they_win"])):
            if cases:
                text += f"\n\nOurs {what} {name}: " + "; ".join(cases) + "."
    return text


def _large(found: dict[str, Any]) -> str:
    header = ["lengths", "context", "stages", "model", "TP x CP", "cap (GB)", "tokens", "chunks", "gap", "recompute", "idle"]
    rows = []
    for r in found["rows"]:
        case = [r["lengths"], f"{r['context'] // 1024}K", str(r["stages"]), r["model"]]
        case += [f"{r['tensor_parallel']} x {r['context_parallel']}", str(r["cap_gb"]), f"{r['tokens']:,}"]
        if "gap" not in r:
            rows.append([*case, "", "no plan", "", "", "", "the cap is below the least that any plan takes"])
            continue
        why = r["why"] if r["gap"] > WORTH_EXPLAINING else ""
        figures = [str(r["chunks"]), _percent(r["gap"]), _percent(r["recompute_share"]), _percent(r["idle_share"])]
        rows.append([*case, *figures, f"{r['planning_ms']:.0f}", why])
    return (
        "## Gap to the lower bound\n\n"
        f"{found['planned']} of {found['cases']} cases have a plan. Gap: median {_percent(found['median_gap'])}, worst "
        f"{_percent(found['worst_gap'])}, at most 5 % in {_percent(found['share_within_5_percent'])} of them. The bound is "
        "that of the chosen chunks. Recompute and idle are shares of the makespan on the busiest rank; idle includes fill and "
        "drain. A stage has the fewest ranks (TP x CP) that leave room under its cap.\n\n"
        + table([*header, "planning (ms)", "why the gap"], rows)
    )
