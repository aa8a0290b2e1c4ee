"""Trains uneven microbatches by Megatron's own 1F1B and by plans, in turn, and prints the ratio of their times.

Two ranks run on a core of their own each, and all schedules in the same processes, one iteration after the other, under several
caps.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from typing import Any

from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.runtime.links.processes import run_ranks
from scripts.bench.frame import Bench, Figures
from scripts.bench.microbatches_rank import CAPPED, FULL, PLANNED, STOCK, run
from scripts.tables import table

RANKS = 2
"""This many cores are needed, with nothing else running on them."""
LONGEST = 1024
"""Most tokens of a microbatch."""
PAIRS = (PLANNED, STOCK), (CAPPED, FULL)


def batch(seed: int, count: int) -> tuple[int, ...]:
    """Draw the tokens of each microbatch of a batch from Wikipedia's quantiles: longer ones are cut, shorter than 16 padded."""
    return tuple(int(length) for length in wikipedia(count, seed).clip(16, LONGEST))


def row(args: Namespace, share: float) -> Figures:
    """Train under a cap.

    Returns:
        for each contender the median time of each batch, its spread (largest less smallest quartile, as a share of the median),
        bytes held on the fullest rank, and the losses of each batch; and how many times as fast plans are.
    """
    batches = [batch(seed, args.microbatches) for seed in range(args.batches)]
    ranks: list[dict[str, Any]] = run_ranks(run, RANKS, batches, args.rounds, share)
    first, last = ranks[0], ranks[-1]
    contenders: dict[str, Figures] = {}
    for name, by_batch in first["times_s"].items():
        quartiles = [statistics.quantiles(times, n=4) for times in by_batch]
        contenders[name] = {
            "seconds": [middle for _, middle, _ in quartiles],
            "spread": max((high - low) / middle for low, middle, high in quartiles),
            "held_bytes": max(rank["held_bytes"][name] for rank in ranks),
            "losses": last["losses"][name],
        }
    return {"cap_bytes": first["cap_bytes"], "contenders": contenders}


def shown(row: Figures) -> str:
    """Format what was trained under a cap: all over the batches, and the ratios, with those of the worst and the best batch."""
    contenders = row["contenders"]
    lines = []
    for name, own in contenders.items():
        figures = f"{sum(own['seconds']):.2f} s", f"{own['spread']:.0%}", f"{own['held_bytes'] / 2**20:.0f} MiB"
        lines.append([name, *figures, f"{statistics.fmean(own['losses']):.5f}"])
    said = [f"{row['case']}: {row['cap_bytes'] / 2**20:.0f} MiB of activations\n"]
    said.append(table(["schedule", "all batches", "widest spread", "held", "mean loss"], lines) + "\n")
    for name, other in PAIRS:
        ours, theirs = contenders[name]["seconds"], contenders[other]["seconds"]
        each = [b / a for a, b in zip(ours, theirs, strict=True)]
        said.append(f"{name} against {other}: {sum(theirs) / sum(ours):.2f}x ({min(each):.2f} to {max(each):.2f} by batch)")
    return "\n".join(said)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"cap at {share:.0%} of what 1F1B without recompute holds": share for share in args.cap_shares},
    row=row,
    text=lambda args, rows: "\n\n".join(map(shown, rows)),
    flags={
        "batches": {"type": int, "default": 6, "help": "batches, which differ in their lengths (default 6)"},
        "microbatches": {"type": int, "default": 16, "help": "microbatches of a batch (default 16)"},
        "rounds": {"type": int, "default": 5, "help": "times that every schedule trains every batch (default 5)"},
        "cap-shares": {
            "type": lambda text: tuple(map(float, text.split(","))),
            "default": (0.5, 0.7, 0.9, 1.0),
            "help": "caps, as shares of what 1F1B without recompute holds (default 0.5,0.7,0.9,1)",
        },
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
