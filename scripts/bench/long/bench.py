"""Measures what KV offload is worth, on paper: makespans of one long sequence, and the longest that fits.

One sequence alone, cut into slices, on a pipeline of one rank per stage. Everything is planned, nothing is trained; costs are
analytic, and makespans are the simulator's. Every context is planned with recompute alone, with offload of activations, and
with KV offload as well. Writes report.json and report.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_epp.cost import OptimizerBytes, PipelineCosts, analytic_profile, on_device
from megatron_epp.cost.library import balanced_layers, load_cluster, load_flags, shape_of
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.report.text import host_peak_bytes
from scripts.bench.planner.report import table

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_long"
GIB, K = 1 << 30, 1 << 10
CLUSTER, REPLICAS = "h100x8", 8
VARIANTS = {
    "recompute": Options(),
    "offload": Options(offload=True, kv_offload=False),
    "offload, KV offload": Options(offload=True),
}


def costs_of(model: str, stages: int, tokens: int) -> PipelineCosts:
    shape = shape_of(load_flags(model) | {"tensor_model_parallel_size": 1, "seq_length": tokens})
    profile = analytic_profile(shape, load_cluster(CLUSTER).rates)
    layers = balanced_layers(profile, shape.num_layers, stages, (tokens,))
    optimizer = OptimizerBytes.of_flags({"data_parallel_size": REPLICAS}, profile.weight_bytes)
    return on_device(profile.costs(layers, optimizer=optimizer))


def planned(a: argparse.Namespace, tokens: int, options: Options) -> Plan | None:
    caps = (a.cap_gb * GIB,) * a.stages
    problem = Problem((tokens,), tuple(range(a.stages)), caps, host_cap_bytes=a.host_gb * GIB)
    try:
        return plan(problem, costs_of(a.model, a.stages, tokens), options)
    except InfeasibleError:
        return None


def figures(a: argparse.Namespace, tokens: int, name: str) -> dict[str, Any] | None:
    start_s = time.process_time()
    plan = planned(a, tokens, VARIANTS[name])
    took_s = time.process_time() - start_s
    print(
        f"{tokens // K}K, {name}: {plan.predicted.makespan_us / 1e6 if plan else None} s, planned in {took_s:.0f} s",
        file=sys.stderr,
    )
    if plan is None:
        return None
    return {
        "makespan_s": plan.predicted.makespan_us / 1e6,
        "above_bound": plan.predicted.makespan_us / plan.predicted.lower_bound_us - 1,
        "chunks": len(plan.chunks),
        "kv_offload_stages": len(plan.kv_offload),
        "copies": sum(map(len, plan.copies)),
        "host_gib": max(host_peak_bytes(plan)) / GIB,
        "planning_s": took_s,
    }


def longest(a: argparse.Namespace, name: str) -> int:
    """Tokens of the longest sequence that fits: from the last context that does, in steps of a quarter of it."""
    low = 0
    for tokens in a.contexts:
        low = tokens * K if planned(a, tokens * K, replace(VARIANTS[name], slices=a.slices)) else low
    step = max(low // 4, 1)
    while low and planned(a, low + step, replace(VARIANTS[name], slices=a.slices)):
        low += step
    return low


def markdown(report: dict[str, Any]) -> str:
    names = list(VARIANTS)

    def cell(row: dict[str, Any] | None) -> str:
        return "no plan" if row is None else f"{row['makespan_s']:.1f} s, {row['host_gib']:.0f} GiB"

    rows = [[f"{context}K", *(cell(row[name]) for name in names)] for context, row in report["rows"].items()]
    if report["longest"]:
        rows.append(["longest", *(f"{report['longest'][name] // K}K" for name in names)])
    return f"# {report['title']}\n\nMakespan, and most in host memory of a rank.\n\n{table(['context', *names], rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.long", description=__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--cap-gb", type=int, default=80, help="device memory of a rank (default: 80)")
    parser.add_argument("--host-gb", type=int, default=200, help="host memory of a rank (default: 200)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048], metavar="K")
    parser.add_argument("--slices", type=int, default=256, help="of the longest sequence that is looked for (default: 256)")
    parser.add_argument("--longest", action="store_true", help="look for the longest sequence too")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for report.json and report.md")
    a = parser.parse_args()
    title = f"{a.model} on {a.stages} stages of {a.cap_gb} GB, {a.host_gb} GB in host memory"
    rows = {str(context): {name: figures(a, context * K, name) for name in VARIANTS} for context in a.contexts}
    report = {"title": title, "rows": rows, "longest": {name: longest(a, name) for name in VARIANTS} if a.longest else {}}
    a.output.mkdir(parents=True, exist_ok=True)
    (a.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (a.output / "report.md").write_text(markdown(report))
    print(markdown(report))
