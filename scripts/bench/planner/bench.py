"""Measures the planner: how fast it plans, how far its plans are from the best, and how they compare with other planners'.

Everything is planned, nothing is trained: all planners share costs (analytic) and caps, makespans are the simulator's. Writes
report.json and report.md. `--reduced` runs a bit of everything in seconds, `--full` everything there is, which takes hours.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

from megatron_epp.cost import H100, analytic_costs
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options, Problem, plan
from scripts.bench.planner.fixed import FIXED
from scripts.bench.planner.report import markdown
from scripts.bench.planner.runs import BATCHES, RunCase, run_row
from scripts.bench.planner.suite import OURS, RIVALS, Case, all_cases, row, sampled_cases

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_planner"
TIE = 0.005
"""Makespans closer than this share count as equal."""


def speed(repeats: int, sizes: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Processor time of planning wikipedia-like batches. sizes: sequences and stages."""
    shape = shape_of(load_flags("llama3-8b"))
    rows = []
    for sequences, stages in sizes:
        costs = analytic_costs(replace(shape, num_layers=2 * stages), H100, [2] * stages, state_bytes_per_parameter=7.5)
        problem = Problem(tuple(wikipedia(sequences, 0).tolist()), tuple(range(stages)), (141 << 30,) * stages)
        times, chunks = [], None
        for _ in range(repeats + 1):
            start_s = time.process_time()
            try:
                chunks = len(plan(problem, costs, Options(planner=OURS)).chunks)
            except InfeasibleError:
                chunks = None
            times.append((time.process_time() - start_s) * 1e3)
        figures = {"chunks": chunks, "planning_ms": min(times[1:] or times)}
        rows.append({"sequences": sequences, "stages": stages} | figures)
        say(f"speed: {sequences} sequences on {stages} stages: {rows[-1]['planning_ms']:.0f} ms")
    return rows


def large(cases: list[Case], planners: tuple[str, ...], jobs: int) -> dict[str, Any]:
    """Gap to the bound, and ratios to other planners, over the suite."""
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        for result in (
            pool.map(partial(row, planners=planners), cases) if jobs > 1 else map(partial(row, planners=planners), cases)
        ):
            rows.append(result)
            say(f"large: {len(rows)} of {len(cases)}, {name_of(result)}: gap {result.get('gap', float('nan')):.2%}")
    planned = [r for r in rows if "gap" in r]
    return (
        {"cases": len(rows), "planned": len(planned)}
        | gaps_of(planned)
        | {
            "all_features": gaps_of([r["all_features"] for r in planned])
            | {"over_default": geometric_mean([r["makespan_us"] / r["all_features"]["makespan_us"] for r in planned])},
            "against": {name: against(rows, name) for name in planners},
            "against_all_features": {name: against(rows, name, all_features=True) for name in planners},
            "rows": rows,
        }
    )


def gaps_of(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    gaps = [r["gap"] for r in rows]
    return {
        "median_gap": statistics.median(gaps) if gaps else None,
        "worst_gap": max(gaps, default=None),
        "share_within_5_percent": sum(gap <= 0.05 for gap in gaps) / len(gaps) if gaps else None,
    }


def runs(cases: list[RunCase], jobs: int) -> dict[str, Any]:
    """Ratios to planners whose setting a run fixes."""
    rows = []
    with ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(run_row, cases) if jobs > 1 else map(run_row, cases):
            rows.append(result)
            say(f"runs: {len(rows)} of {len(cases)}, {name_of(result)}")
    return {
        "cases": len(rows),
        "batches": BATCHES,
        "planned": sum("makespan_us" in r for r in rows),
        "against": {name: against(rows, name) for name in FIXED},
        "against_all_features": {name: against(rows, name, all_features=True) for name in FIXED},
        "rows": rows,
    }


def against(rows: list[dict[str, Any]], name: str, all_features: bool = False) -> dict[str, Any]:
    """Geometric mean of their makespan over ours (with all features), where both have a plan; and over our plan's lower bound,
    which is the most that any order and recompute of our chunks could win.
    """
    both = [
        (r["rivals"][name]["makespan_us"] / (r["all_features"] if all_features else r)["makespan_us"], r)
        for r in rows
        if "makespan_us" in r and r["rivals"][name]["makespan_us"] is not None
    ]
    gaps = [(ratio, (r["all_features"] if all_features else r).get("gap")) for ratio, r in both]
    tight = [ratio for ratio, r in both if r["recompute_share"] > 0]
    return {
        "both_have_a_plan": len(both),
        "only_we_have_one": sum("makespan_us" in r and r["rivals"][name]["makespan_us"] is None for r in rows),
        "only_they_have_one": sum("makespan_us" not in r and r["rivals"][name]["makespan_us"] is not None for r in rows),
        "geometric_mean": geometric_mean([ratio for ratio, _ in both]),
        "geometric_mean_where_memory_binds": geometric_mean(tight),
        "geometric_mean_over_bound": geometric_mean([ratio * (1 + gap) for ratio, gap in gaps if gap is not None]),
        "least": min((ratio for ratio, _ in both), default=None),
        "most": max((ratio for ratio, _ in both), default=None),
        "ties": [name_of(r) for ratio, r in both if abs(ratio - 1) <= TIE],
        "they_win": [f"{name_of(r)}: {ratio:.3f}" for ratio, r in both if ratio < 1 - TIE],
    }


def geometric_mean(ratios: list[float]) -> float | None:
    return exp(statistics.fmean(map(log, ratios))) if ratios else None


def name_of(r: dict[str, Any]) -> str:
    return f"{r['lengths']} {r['context'] // 1024}K, {r['stages']} stages, {r['model']}, {r['cap_gb']} GB"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def suite(a: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    cases = all_cases() if a.full else sampled_cases()
    if a.reduced:
        cases = [case for case in cases if case.stages == 4 and case.context <= 131072 and case.cap_gb < 100][:1]
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.planner", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--reduced", action="store_true", help="a few small cases")
    size.add_argument("--full", action="store_true", help="all 540 cases of the suite")
    parser.add_argument("--parts", default="speed,large,runs", help="what to measure (default: all)")
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"of part large (default: {','.join(RIVALS)})")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1); speed is always measured alone")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for report.json and report.md")
    a = parser.parse_args()
    parts, start_s = a.parts.split(","), time.perf_counter()
    sizes = [(512, 16), (1024, 16), (1024, 32), (2048, 32), (4096, 64)]
    report: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    measured: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed(0 if a.reduced else 3, [(64, 4), (128, 4)] if a.reduced else sizes),
        "runs": lambda: runs([RunCase(*astuple(case)) for case in suite(a)], a.jobs),
        "large": lambda: large(suite(a), tuple(a.rivals.split(",")), a.jobs),
    }
    a.output.mkdir(parents=True, exist_ok=True)
    for part in (part for part in measured if part in parts):
        report[part] = measured[part]()
        report["minutes"] = (time.perf_counter() - start_s) / 60
        (a.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (a.output / "report.md").write_text(markdown(report))
    print(markdown(report))
