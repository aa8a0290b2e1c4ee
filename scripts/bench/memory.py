"""Measures what recompute modes and offload are worth: makespans, efficiency and context under caps that bind.

The batches, models and pipelines are those of `bench/planner`. Every batch gets caps between the smallest that recompute of
whole layers fits and the peak without recompute: at 2, 10 and 30 % of the way. Everything is planned, nothing is trained; all
plans share costs (analytic), and makespans are the simulator's. Efficiency is the time of the pure computation, spread evenly
over the ranks, over the makespan: what layers that do not divide evenly cost counts against it, as filling and draining do.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import Plan
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from scripts.bench.frame import Bench, Figures, geometric_mean
from scripts.bench.planner.suite import Case, fitting, least_cap_bytes, sampled_cases
from scripts.tables import table

GIB = 1 << 30
BASE = "whole layers"
VARIANTS = {
    BASE: Options(recompute_modes="full"),
    "levels": Options(),
    "whole layers, offload": Options(recompute_modes="full", offload=True),
    "levels, offload": Options(offload=True),
}
TIGHTNESS = (0.02, 0.1, 0.3)
LONGEST = 1 << 24


def planned(problem: Problem, costs: PipelineCosts, cap: int, options: Options) -> Plan | None:
    return fitting(replace(problem, cap_bytes=(cap,) * problem.num_stages), costs, options)


def figures(plan: Plan | None) -> dict[str, float] | None:
    if plan is None:
        return None
    again_us = [sum(row) for row in plan.recompute_us]  # one stage on each rank
    pure_us = [sum(step.time_us for step in steps) - again for steps, again in zip(plan.ranks, again_us, strict=True)]
    makespan_us = plan.predicted.makespan_us
    return {
        "makespan_us": makespan_us,
        "efficiency": sum(pure_us) / plan.num_ranks / makespan_us,
        "recompute_share": sum(again_us) / sum(pure_us + again_us),
        "offloaded_share": statistics.fmean(share for row in plan.offload_share for share in row),
        "chunks": len(plan.chunks),
    }


def row(args: Namespace, case: Case) -> Figures:
    """Return the figures of every way to plan a case under every cap, and without one."""
    problem, costs = case.problem, case.costs
    free = planned(problem, costs, UNLIMITED_BYTES, Options())
    assert free is not None
    most = max(free.predicted.peak_bytes)
    least = least_cap_bytes(problem, costs, VARIANTS[BASE])
    caps = {str(share): int(least + share * (most - least)) for share in TIGHTNESS}
    return {
        "least_gib": least / GIB,
        "free_gib": most / GIB,
        "free": figures(free),
        "caps": {
            share: {name: figures(planned(problem, costs, cap, options)) for name, options in VARIANTS.items()}
            for share, cap in caps.items()
        },
        "longest": {name: longest(case, options) for name, options in VARIANTS.items()},
    }


def longest(case: Case, options: Options) -> int:
    """Tokens of the longest sequence that fits the case's own cap by itself: powers of two, then two steps between them."""
    low = 0
    for step in (2.0, 2**0.5, 2**0.25):
        tokens = int(max(low * step, 1 << 13))
        while tokens < LONGEST and planned(replace(case.problem, lengths=(tokens,)), case.costs, case.cap_gb << 30, options):
            low, tokens = tokens, int(tokens * step)
    return low


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    cells = []
    for name in VARIANTS:
        line = [name]
        for share in map(str, TIGHTNESS):
            both = [(r["caps"][share][BASE], r["caps"][share][name]) for r in rows]
            faster = geometric_mean([base["makespan_us"] / own["makespan_us"] for base, own in both if base and own])
            efficiencies = [own["efficiency"] for _, own in both if own]
            line.append("no plan" if faster is None else f"{faster:.2f} ({statistics.median(efficiencies):.2f})")
        longer = geometric_mean([r["longest"][name] / r["longest"][BASE] for r in rows if r["longest"][BASE]])
        cells.append([*line, f"{longer:.2f}"])
    speeds = table(["", *(f"{share:.0%} of the way" for share in TIGHTNESS), "longest sequence"], cells)
    free = statistics.median(r["free"]["efficiency"] for r in rows)
    return (
        "How much faster than with recompute of whole layers alone (geometric mean), in brackets the median efficiency, under "
        "caps between the smallest that whole-layer recompute fits and none; and how much longer a sequence fits the case's "
        f"own cap. Without any cap the median is {free:.2f}.\n\n{speeds}"
    )


def cases(args: Namespace) -> dict[str, Case]:
    chosen = [Case("equal", 32768, 4, "llama3-8b", 40)] if args.reduced else sampled_cases()[:: args.every]
    return {f"{c.lengths_like} {c.context // 1024}K, {c.stages} x {c.shape.ranks} ranks, {c.model}": c for c in chosen}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    flags={
        "every": {"type": int, "default": 1, "metavar": "K", "help": "every K-th case of the suite's 32 (default: all)"},
    },
    reduced="one small case",
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
