"""Comparison of orders of other papers with greedy's on random batches: how often each is faster, and by how much.

    python -m scripts.bench.orders.random_batches --seeds 0:100 -o runs/random_batches.jsonl

Llama 3 8B with costs by formulas for H100s, on 4 or 8 ranks. A seed draws kind and number of the lengths, the context, the
ranks and the cap, which is 1.02 to 3 times the least that greedy with one stage per rank can do with. Every order and greedy
have the same placement, cap and options. Seeds that the file has already are not planned again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.cli.terminal import progress
from megatron_epp.cost.library import even_layers
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.registry import PLANNERS
from scripts.bench.orders.bench import LAYERS, ORDERS, TIE, costs_of

CONTEXTS = (8192, 16384, 32768, 65536)
COUNTS = (16, 32, 64, 128)
LENGTHS = {
    "wikipedia": sequence_lengths.wikipedia,
    "code": sequence_lengths.code,
    "chat": sequence_lengths.chat,
    "equal": lambda count, seed: np.full(count, 4096),
}
TIGHTEST, WIDEST = 1.02, 3.0
"""Caps as multiples of the least: little above it, and with room for a plan without recompute."""


def drawn(seed: int) -> tuple[str, Problem]:
    """Return the name of a random batch, and the batch under its cap with one stage per rank."""
    random = np.random.RandomState(seed)
    kind, context = random.choice(list(LENGTHS)), int(random.choice(CONTEXTS))
    count, ranks = int(random.choice(COUNTS)), int(random.choice((4, 8)))
    lengths = tuple(np.minimum(LENGTHS[kind](count, seed), context).tolist())
    least = _least_cap_bytes(lengths, ranks)
    cap_bytes = int(least * float(np.exp(random.uniform(np.log(TIGHTEST), np.log(WIDEST)))))
    name = f"{count} {kind} up to {max(lengths):,} on {ranks} ranks, {cap_bytes / least:.2f} of the least cap"
    return name, Problem(lengths, tuple(range(ranks)), (cap_bytes,) * ranks)


def _least_cap_bytes(lengths: tuple[int, ...], ranks: int) -> int:
    try:
        costs = costs_of(_even(ranks), max(lengths))
        plan(Problem(lengths, tuple(range(ranks)), (1,) * ranks), costs, Options())
    except InfeasibleError as error:
        return error.least_cap_bytes
    raise AssertionError("a plan under one byte")


def _even(ranks: int) -> Layout:
    return Layout.of_layers(even_layers(LAYERS, ranks), Placement("looped", ranks, 1))


def ratios(seed: int, orders: Sequence[str] | None = None) -> dict[str, Any]:
    """Return each order's makespan and greedy's for a random batch; None where the order, or greedy, has no plan.

    Args:
        orders: names; None for all.
    """
    name, problem = drawn(seed)
    makespans_us: dict[tuple[Layout, str, bool, bool], float | None] = {}

    def makespan_us(layout: Layout, planner: str, split: bool, overlap: bool) -> float | None:
        key = (layout, planner, split, overlap)
        if key not in makespans_us:
            there = Problem(problem.lengths, layout.placement.rank_of, problem.cap_bytes)
            options = Options(planner=planner, split_weight=split, overlap_exchanges=overlap)
            try:
                makespans_us[key] = plan(there, costs_of(layout, max(problem.lengths)), options).predicted.makespan_us
            except (InfeasibleError, PlanError):  # nothing fits, or the order takes no such batch
                makespans_us[key] = None
        return makespans_us[key]

    rows = {}
    for order in orders or ORDERS:
        planner, count = ORDERS[order]
        schedule = PLANNERS.entries()[planner]
        assert schedule.fixed is not None
        layout = schedule.fixed.layout(LAYERS, problem.num_ranks, count)
        usual = _even(problem.num_ranks) if schedule.lacks else layout
        theirs, ours = (
            makespan_us(layout, planner, schedule.splits_weight, schedule.joins),
            makespan_us(usual, "greedy", schedule.splits_weight, schedule.joins),
        )
        rows[order] = {"makespan_us": theirs, "greedy_us": ours}
    return {"seed": seed, "batch": name, "orders": rows}


def summary(rows_of_seeds: Iterable[dict[str, Any]]) -> list[str]:
    """Format how often greedy is faster than each order, as fast within `TIE`, and slower."""
    names = f"{'greedy faster':>13} {'as fast':>8} {'slower':>7} {'only greedy':>12} {'only it':>8} {'least ratio':>12}"
    lines, rows_of_seeds = [f"{'order':<15} {names}"], list(rows_of_seeds)
    for order in dict.fromkeys(order for row in rows_of_seeds for order in row["orders"]):
        rows = [of_seed["orders"][order] for of_seed in rows_of_seeds if order in of_seed["orders"]]
        both = [row["makespan_us"] / row["greedy_us"] for row in rows if row["makespan_us"] and row["greedy_us"]]
        slower, faster = sum(ratio < 1 - TIE for ratio in both), sum(ratio > 1 + TIE for ratio in both)
        alone = sum(bool(row["greedy_us"] and not row["makespan_us"]) for row in rows)
        theirs = sum(bool(row["makespan_us"] and not row["greedy_us"]) for row in rows)
        least = f"{min(both):12.3f}" if both else f"{'':>12}"
        lines.append(f"{order:<15} {faster:13} {len(both) - slower - faster:8} {slower:7} {alone:12} {theirs:8} {least}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.orders.random_batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", default="0:100", metavar="FROM:TO", help="batches to plan (default: %(default)s)")
    parser.add_argument("--order", choices=ORDERS, action="append", help="only this order; may be repeated (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="a line of JSON for every batch")
    args = parser.parse_args(argv)
    first, end = map(int, args.seeds.split(":"))
    rows = [json.loads(line) for line in args.output.read_text().splitlines()] if args.output.exists() else []
    known = {row["seed"] for row in rows}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("a") as output, progress("planning random batches", lambda: f"{len(rows)} of {end - first}"):
        for seed in [seed for seed in range(first, end) if seed not in known]:
            rows.append(ratios(seed, args.order))
            output.write(json.dumps(rows[-1]) + "\n")
            output.flush()
    print("\n".join(summary(rows)))
    for of_seed in rows:
        for order, row in of_seed["orders"].items():
            if row["makespan_us"] and row["greedy_us"] and row["makespan_us"] < (1 - TIE) * row["greedy_us"]:
                print(f"seed {of_seed['seed']}, {of_seed['batch']}: {order} {row['makespan_us'] / row['greedy_us']:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
