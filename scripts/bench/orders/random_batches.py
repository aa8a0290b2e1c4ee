"""Comparison of orders of other papers with greedy's on random batches: how often each is faster, and by how much.

    python -m scripts.bench.orders.random_batches --seeds 0:100 --json runs/random_batches.json

Llama 3 8B with costs by formulas for H100s, on 4 or 8 ranks. A seed draws kind and number of the lengths, the context, the
ranks and the cap, which is 1.02 to 3 times the least that greedy with one stage per rank can do with. Every order and greedy
have the same placement, cap and options. Seeds that the file has already are not planned again.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.planner import Options, Problem, plan
from scripts.bench.frame import Bench, Figures
from scripts.bench.orders.orders import LAYERS, ORDERS, TIE, costs_of
from scripts.bench.planner.suite import DRAWS, least_cap_bytes
from scripts.tables import table

CONTEXTS = (8192, 16384, 32768, 65536)
COUNTS = (16, 32, 64, 128)
LENGTHS = {name: DRAWS[name] for name in ("wikipedia", "code", "agents")} | {"equal": lambda count, seed: np.full(count, 4096)}
TIGHTEST, WIDEST = 1.02, 3.0
"""Caps as multiples of the least: little above it, and with room for a plan without recompute."""


def drawn(seed: int) -> tuple[str, Problem]:
    """Return the name of a random batch, and the batch under its cap with one stage per rank."""
    random = np.random.RandomState(seed)
    kind, context = random.choice(list(LENGTHS)), int(random.choice(CONTEXTS))
    count, ranks = int(random.choice(COUNTS)), int(random.choice((4, 8)))
    lengths = tuple(np.minimum(LENGTHS[kind](count, seed), context).tolist())
    problem = Problem(lengths, tuple(range(ranks)), (1,) * ranks)
    least = least_cap_bytes(problem, costs_of(_even(ranks), max(lengths)), Options())
    cap_bytes = int(least * float(np.exp(random.uniform(np.log(TIGHTEST), np.log(WIDEST)))))
    name = f"{count} {kind} up to {max(lengths):,} on {ranks} ranks, {cap_bytes / least:.2f} of the least cap"
    return name, replace(problem, cap_bytes=(cap_bytes,) * ranks)


def _even(ranks: int) -> Layout:
    return Layout(even_layers(LAYERS, ranks), Placement("looped", ranks, 1))


def ratios(seed: int, orders: Sequence[str] | None = None) -> Figures:
    """Return each order's makespan and greedy's for a random batch; None where the order, or greedy, has no plan.

    Args:
        orders: names; None for all.
    """
    name, problem = drawn(seed)

    @cache
    def makespan_us(layout: Layout, planner: str, split: bool, overlap: bool) -> float | None:
        there = replace(problem, placement=layout.placement.rank_of)
        options = Options(planner=planner, split_weight=split, overlap_exchanges=overlap)
        try:
            return plan(there, costs_of(layout, max(problem.lengths)), options).predicted.makespan_us
        except (InfeasibleError, PlanError):  # nothing fits, or the order takes no such batch
            return None

    rows = {}
    for order in orders or ORDERS:
        planner, count = ORDERS[order]
        schedule = PLANNERS.entries()[planner]
        assert schedule.fixed is not None
        layout = schedule.fixed.layout(LAYERS, problem.num_ranks, count)
        uses = schedule.splits_weight, schedule.joins
        usual = _even(problem.num_ranks) if schedule.placement == "ring" else layout
        rows[order] = {"makespan_us": makespan_us(layout, planner, *uses), "greedy_us": makespan_us(usual, "greedy", *uses)}
    return {"seed": seed, "batch": name, "orders": rows}


def row(args: Namespace, seed: int) -> Figures:
    return args.known.get(str(seed)) or ratios(seed, args.order)


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format how often greedy is faster than each order, as fast within `TIE`, and slower; and where it is slower."""
    lines, slower = [], []
    for order in dict.fromkeys(order for row in rows for order in row["orders"]):
        own = [(row, row["orders"][order]) for row in rows if order in row["orders"]]
        alone, theirs = (
            sum(bool(times[a] and not times[b]) for _, times in own)
            for a, b in (("greedy_us", "makespan_us"), ("makespan_us", "greedy_us"))
        )
        both = [(times["makespan_us"] / times["greedy_us"], row) for row, times in own if all(times.values())]
        wins = [(ratio, row) for ratio, row in both if ratio < 1 - TIE]
        faster = sum(ratio > 1 + TIE for ratio, _ in both)
        least = f"{min(ratio for ratio, _ in both):.3f}" if both else ""
        lines.append([order, faster, len(both) - len(wins) - faster, len(wins), alone, theirs, least])
        slower += [f"seed {row['seed']}, {row['batch']}: {order} {ratio:.3f}" for ratio, row in wins]
    titles = ["order", "greedy faster", "as fast", "slower", "only greedy", "only it", "least ratio"]
    return "\n".join([table(titles, lines), *slower])


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {str(seed): seed for seed in range(*map(int, args.seeds.split(":")))},
    row=row,
    text=text,
    flags={
        "seeds": {"default": "0:100", "metavar": "FROM:TO", "help": "batches to plan (default: %(default)s)"},
        "order": {"choices": ORDERS, "action": "append", "help": "only this order; may be repeated (default: all)"},
    },
    resumes=True,
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
