"""Measures what recompute modes and offload are worth: makespans, efficiency and context under caps that bind.

The batches, models and pipelines are those of `bench/planner`. Every batch gets caps between the smallest that recompute of
whole layers fits and the peak without recompute: at 2, 10 and 30 % of the way. Everything is planned, nothing is trained; all
plans share costs (analytic), and makespans are the simulator's. Efficiency is the time of the pure computation, spread evenly
over the ranks, over the makespan: what layers that do not divide evenly cost counts against it, as filling and draining do. The
busiest rank's is its own pure computation over the makespan. With `--sharing`, what offload gains over links to the host that
stages share: each with one of its own, in turns, and with a fixed part of it at all times.
Writes report.json and report.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

from megatron_epp.cost import PipelineCosts
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from scripts.bench.planner.report import table
from scripts.bench.planner.suite import Case, sampled_cases


@dataclass(frozen=True)
class Variant:
    """Options of the planners, and the way in which ranks share a link to the host: "turns", "parts", or none."""

    options: Options
    links: str = ""

    def costs(self, case: Case, sharing: int) -> PipelineCosts:
        if self.links == "turns":
            return replace(case.costs, host_turns=sharing)
        return replace(case.costs, host_us_per_byte=(sharing if self.links else 1) * case.costs.host_us_per_byte)


FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_memory"
GIB = 1 << 30
BASE = "whole layers"
VARIANTS = {
    BASE: Variant(Options(recompute_modes="full")),
    "levels": Variant(Options()),
    "whole layers, offload": Variant(Options(recompute_modes="full", offload=True)),
    "levels, offload": Variant(Options(offload=True)),
}
SHARING = {
    BASE: VARIANTS[BASE],
    "offload, links of their own": Variant(Options(offload=True)),
    "offload, in turns": Variant(Options(offload=True), "turns"),
    "offload, fixed parts": Variant(Options(offload=True), "parts"),
}
TIGHTNESS = (0.02, 0.1, 0.3)
LONGEST = 1 << 24


def planned(problem: Problem, costs: PipelineCosts, cap: int, options: Options) -> Plan | None:
    try:
        return plan(replace(problem, cap_bytes=(cap,) * problem.num_stages), costs, options)
    except InfeasibleError:
        return None


def least_cap(problem: Problem, costs: PipelineCosts, options: Options) -> int:
    """The smallest cap that a plan fits, as the planner names it when none does."""
    try:
        plan(replace(problem, cap_bytes=(1,) * problem.num_stages), costs, options)
    except InfeasibleError as error:
        return error.least_cap_bytes
    raise AssertionError("a plan fits one byte")


def figures(plan: Plan | None) -> dict[str, float] | None:
    if plan is None:
        return None
    again_us = [sum(row) for row in plan.recompute_us]  # one stage on each rank
    pure_us = [sum(step.time_us for step in steps) - again for steps, again in zip(plan.ranks, again_us, strict=True)]
    makespan_us = plan.predicted.makespan_us
    return {
        "makespan_us": makespan_us,
        "efficiency": sum(pure_us) / plan.num_ranks / makespan_us,
        "busiest": max(pure_us) / makespan_us,
        "recompute_share": sum(again_us) / sum(pure_us + again_us),
        "offloaded_share": statistics.fmean(share for row in plan.offload_share for share in row),
        "chunks": len(plan.chunks),
    }


def row(case: Case, variants: dict[str, Variant] = VARIANTS, sharing: int = 1) -> dict[str, Any]:
    """Every variant of one case under every cap, and without one."""
    problem, costs = case.problem, case.costs
    free = planned(problem, costs, UNLIMITED_BYTES, Options())
    assert free is not None
    most = max(free.predicted.peak_bytes)
    least = least_cap(problem, costs, variants[BASE].options)
    caps = {str(share): int(least + share * (most - least)) for share in TIGHTNESS}
    return {
        "name": f"{case.lengths_like} {case.context // 1024}K, {case.stages} x {case.shape.ranks} ranks, {case.model}",
        "least_gib": least / GIB,
        "free_gib": most / GIB,
        "free": figures(free),
        "caps": {
            share: {name: figures(planned(problem, v.costs(case, sharing), cap, v.options)) for name, v in variants.items()}
            for share, cap in caps.items()
        },
        "longest": {name: longest(case, v.costs(case, sharing), v.options) for name, v in variants.items()},
    }


def longest(case: Case, costs: PipelineCosts, options: Options) -> int:
    """Tokens of the longest sequence that fits the case's own cap by itself: powers of two, then two steps between them."""
    low = 0
    for step in (2.0, 2**0.5, 2**0.25):
        tokens = int(max(low * step, 1 << 13))
        while tokens < LONGEST and planned(replace(case.problem, lengths=(tokens,)), costs, case.cap_gb << 30, options):
            low, tokens = tokens, int(tokens * step)
    return low


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by_cap: dict[str, Any] = {}
    for share in map(str, TIGHTNESS):
        for name in rows[0]["longest"]:
            both = [(r["caps"][share][BASE], r["caps"][share][name]) for r in rows]
            ratios = [base["makespan_us"] / own["makespan_us"] for base, own in both if base and own]
            by_cap.setdefault(share, {})[name] = {
                "faster": exp(statistics.fmean(map(log, ratios))) if ratios else None,
                "efficiency": statistics.median(own["efficiency"] for _, own in both if own),
                "busiest": statistics.median(own["busiest"] for _, own in both if own),
            }
    contexts = {
        name: [r["longest"][name] / r["longest"][BASE] for r in rows if r["longest"][BASE]] for name in rows[0]["longest"]
    }
    return {
        "by_cap": by_cap,
        "free": {key: statistics.median(r["free"][key] for r in rows) for key in ("efficiency", "busiest")},
        "longer_context": {name: exp(statistics.fmean(map(log, ratios))) for name, ratios in contexts.items()},
    }


def markdown(report: dict[str, Any]) -> str:
    totals = report["summary"]
    header = ["", *(f"{float(share):.0%} of the way" for share in totals["by_cap"]), "longest sequence"]
    cells = []
    for name in totals["longer_context"]:
        own = [figures[name] for figures in totals["by_cap"].values()]
        cells.append(
            [
                name,
                *(f"{f['faster']:.2f} ({f['efficiency']:.2f}, {f['busiest']:.2f})" for f in own),
                f"{totals['longer_context'][name]:.2f}",
            ]
        )
    lines = [f"# Memory features, planned\n\n{len(report['rows'])} cases, {report['minutes']:.1f} minutes."]
    lines.append(
        "How much faster than with recompute of whole layers alone (geometric mean), in brackets the median efficiency and the "
        "busiest rank's, under caps between the smallest that whole-layer recompute fits and none; and how much longer a "
        "sequence fits the case's own cap. Without any cap the medians are "
        f"{totals['free']['efficiency']:.2f} and {totals['free']['busiest']:.2f}.\n\n{table(header, cells)}"
    )
    header = [
        "case",
        "least (GiB)",
        "free (GiB)",
        "free",
        *(f"{float(s):.0%}: {n}" for s in TIGHTNESS for n in totals["longer_context"]),
    ]
    cells = []
    for r in report["rows"]:
        every = [r["caps"][str(share)][name] for share in TIGHTNESS for name in totals["longer_context"]]
        shown = [f"{f['efficiency']:.2f}" if f else "no plan" for f in (r["free"], *every)]
        cells.append([r["name"], f"{r['least_gib']:.1f}", f"{r['free_gib']:.1f}", *shown])
    lines.append(f"Efficiency of every case:\n\n{table(header, cells)}")
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.memory", description=__doc__)
    parser.add_argument("--reduced", action="store_true", help="one small case")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th case of the suite's 32 (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument(
        "--sharing", type=int, metavar="N", help="stages that share a link to the host: compare ways to share it"
    )
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for report.json and report.md")
    a = parser.parse_args()
    cases = sampled_cases()[:: a.every]
    if a.reduced:
        cases = [Case("equal", 32768, 4, "llama3-8b", 40)]
    rows, start_s = [], time.perf_counter()
    plan_row = partial(row, variants=SHARING, sharing=a.sharing) if a.sharing else row
    with ProcessPoolExecutor(a.jobs) as pool:
        for result in pool.map(plan_row, cases) if a.jobs > 1 else map(plan_row, cases):
            rows.append(result)
            print(f"{len(rows)} of {len(cases)}: {result['name']}", file=sys.stderr, flush=True)
    report = {"rows": rows, "summary": summary(rows), "minutes": (time.perf_counter() - start_s) / 60}
    a.output.mkdir(parents=True, exist_ok=True)
    (a.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (a.output / "report.md").write_text(markdown(report))
    print(markdown(report))
