"""Trains uneven microbatches by Megatron's own 1F1B and by plans, in turn, and prints the ratio of their times.

Two ranks run on a core of their own each, and all schedules in the same processes, one iteration after the other, under several
caps. With more ranks than cores compute is emulated by timed waits (`--emulate`), for plans and for 1F1B alike.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_epp.runtime.links.processes import run_ranks
from scripts.bench.frame import Bench, Figures, numbers
from scripts.bench.microbatches import emulated
from scripts.bench.microbatches.rank import CAPPED, FULL, PLANNED, STOCK, run
from scripts.tables import table

RANKS = 2
"""Ranks of the trained part: this many cores, nothing else running on them."""
PAIRS = (PLANNED, STOCK), (CAPPED, FULL)


def trained(args: Namespace, share: float) -> Figures:
    """Train under a cap.

    Returns:
        for each contender the median time of each batch, its spread (largest less smallest quartile, as a share of the median),
        bytes held on the fullest rank, and the losses of each batch; and how many times as fast plans are.
    """
    batches = [emulated.batch(seed, args.microbatches) for seed in range(args.batches)]
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


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    parts = [shown(row) for row in rows if "contenders" in row]
    if waits := [emulated.cells_of(row) for row in rows if "stock_s" in row]:
        parts.append(table(emulated.HEADER, waits))
    return "\n\n".join(parts)


def cases(args: Namespace) -> dict[str, partial[Figures]]:
    caps = {
        f"cap at {share:.0%} of what 1F1B without recompute holds": partial(trained, args, share) for share in args.cap_shares
    }
    sizes = [(kind, ranks) for kind in ("one sample each", "packed") for ranks in args.emulate]
    return caps | {f"{ranks} emulated ranks, {kind}": partial(emulated.compare, kind, ranks) for kind, ranks in sizes}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=lambda args, case: case(),
    text=text,
    flags={
        "batches": {"type": int, "default": 6, "help": "batches, which differ in their lengths (default 6)"},
        "microbatches": {"type": int, "default": 16, "help": "microbatches of a batch (default 16)"},
        "rounds": {"type": int, "default": 5, "help": "times that every schedule trains every batch (default 5)"},
        "cap-shares": {
            "type": lambda text: tuple(map(float, text.split(","))),
            "default": (0.5, 0.7, 0.9, 1.0),
            "help": "caps, as shares of what 1F1B without recompute holds (default 0.5,0.7,0.9,1)",
        },
        "emulate": {
            "type": numbers,
            "default": (4, 8, 16),
            "help": "sizes of the emulated pipelines (default 4,8,16; ''; none)",
        },
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
