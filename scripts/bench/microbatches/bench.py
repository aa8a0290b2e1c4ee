"""Trains uneven microbatches by Megatron's own 1F1B and by plans, in turn, and prints the ratio of their times.

Two ranks run on a core of their own each, and all schedules in the same processes, one iteration after the other. With more
ranks than cores compute is emulated by timed waits (`--emulate`), for plans and for 1F1B alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_epp.cli.terminal import progress
from megatron_epp.launch.machine import machine
from megatron_epp.report.text import table
from megatron_epp.runtime.links.processes import run_ranks
from scripts.bench.microbatches.batches import batch
from scripts.bench.microbatches.emulated import HEADER, compare, lines_of
from scripts.bench.microbatches.rank import CAPPED, FULL, PLANNED, STOCK, run

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_microbatches"
RANKS = 2
"""Ranks of the trained part: this many cores, nothing else running on them."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.microbatches", description=__doc__)
    parser.add_argument("--batches", type=int, default=6, help="batches, which differ in their lengths (default 6)")
    parser.add_argument("--microbatches", type=int, default=16, help="microbatches of a batch (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="times that every schedule trains every batch (default 5)")
    parser.add_argument(
        "--cap-shares",
        type=lambda text: tuple(map(float, text.split(","))),
        default=(0.5, 0.7, 0.9, 1.0),
        help="caps, as shares of what 1F1B without recompute holds (default 0.5,0.7,0.9,1)",
    )
    parser.add_argument(
        "--emulate",
        type=lambda text: tuple(map(int, filter(None, text.split(",")))),
        default=(4, 8, 16),
        help="sizes of the emulated pipelines (default 4,8,16; empty: none)",
    )
    a = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    lengths = [batch(seed, a.microbatches) for seed in range(a.batches)]
    report: dict[str, Any] = {"machine": machine(), "batches": lengths, "load_before": os.getloadavg()[0], "caps": {}}
    for share in a.cap_shares:
        print(f"cap at {share:.0%} of what 1F1B without recompute holds", flush=True)
        totals = summary(run_ranks(run, RANKS, lengths, a.rounds, share))
        report["caps"][share] = totals
        print(shown(totals), flush=True)
    report["emulated"] = emulated(a.emulate)
    report["load_after"] = os.getloadavg()[0]
    (FOLDER / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def emulated(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Emulate pipelines of some sizes, with microbatches of both kinds; print a table and return its rows."""
    results = []
    for kind in ("one sample each", "packed"):
        for num_ranks in sizes:
            with progress(f"emulating {num_ranks} ranks, {kind}"):
                results.append(compare(kind, num_ranks, 8 * num_ranks, cap_share=0.5))
    print("\n".join(table(HEADER, lines_of(results))))
    return [result._asdict() for result in results]


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the measurements of all ranks.

    Returns:
        for each contender the median time of each batch, its spread (largest less smallest quartile, as a share of the median),
        bytes held on the fullest rank, and the losses of each batch; and how many times as fast plans are.
    """
    first, last = ranks[0], ranks[-1]
    totals: dict[str, Any] = {"cap_bytes": first["cap_bytes"], "contenders": {}}
    for name, by_batch in first["times_s"].items():
        quartiles = [statistics.quantiles(times, n=4) for times in by_batch]
        totals["contenders"][name] = {
            "seconds": [middle for _, middle, _ in quartiles],
            "spread": max((high - low) / middle for low, middle, high in quartiles),
            "held_bytes": max(rank["held_bytes"][name] for rank in ranks),
            "losses": last["losses"][name],
        }
    for ours, theirs in ((PLANNED, STOCK), (CAPPED, FULL)):
        totals[f"{ours} against {theirs}"] = ratio(totals, theirs, ours)
    return totals


def ratio(totals: dict[str, Any], slower: str, faster: str) -> dict[str, float]:
    """Return how many times as fast a contender is as another: over all batches, and on the worst and the best batch."""
    ours, theirs = (totals["contenders"][name]["seconds"] for name in (faster, slower))
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {"all": sum(theirs) / sum(ours), "worst": min(each), "best": max(each)}


def shown(totals: dict[str, Any]) -> str:
    """Format a summary as a table, with the ratios below."""
    rows = [
        [
            name,
            f"{sum(contender['seconds']):.2f} s",
            f"{contender['spread']:.0%}",
            f"{contender['held_bytes'] / 2**20:.0f} MiB",
            f"{sum(contender['losses']) / len(contender['losses']):.5f}",
        ]
        for name, contender in totals["contenders"].items()
    ]
    lines = [*table(["schedule", "all batches", "widest spread", "held", "mean loss"], rows)]
    lines.append(f"cap on what is held: {totals['cap_bytes'] / 2**20:.0f} MiB")
    for ours, theirs in ((PLANNED, STOCK), (CAPPED, FULL)):
        gain = totals[f"{ours} against {theirs}"]
        lines.append(f"{ours} against {theirs}: {gain['all']:.2f}x ({gain['worst']:.2f} to {gain['best']:.2f} by batch)")
    return "\n".join(lines)
