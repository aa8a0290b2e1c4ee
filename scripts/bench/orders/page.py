"""The page of schedules: claims of papers, what our versions do, a picture of each, and a comparison on three batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_epp.planner.schedules import SCHEDULES
from megatron_epp.report.gantt import side_by_side
from scripts.bench.orders.unit import Unit
from scripts.bench.planner.report import table

RANKS, MICROBATCHES = 8, 32
DRAWN_RANKS, DRAWN_MICROBATCHES = 4, 8
CLAIMS: dict[str, tuple[str, float | None, str, float | None]] = {
    "gpipe": ("`3 (p-1)`", 21, "`m`", 32),
    "1f1b-sliced": ("`3 (p-1)`", 21, "`p`", 8),
    "terapipe": ("`3 (p-1) / n`, for n = 4 slices", 5.25, "none", None),
    "kfkb": ("`3 (p-1)`", 21, "`k p`, for k = 1", 8),
    "interleaved": ("`3 (p-1) / v`", 10.5, "`p + (p-1) / v`", 11.5),
    "breadth-first": ("`3 (p-1) / v`", 10.5, "`m`", 32),
    "zb-h1": ("`p-1`", 7, "`p`", 8),
    "zb-h2": ("0 between a rank's ends", None, "`2p-1`", 15),
    "zb-v": ("0 between a rank's ends", None, "`p`", 8),
    "v-min": ("`2 (p-1)` and a constant", 14, "`p/3` and a constant", 8 / 3),
    "v-half": ("`1.5 (p-1)` and a constant", 10.5, "`p/2` and a constant", 4),
    "dualpipe-v": ("F and B overlap there", None, "`p+1`", 9),
    "hanayo": ("none for more than `p`", None, "none", None),
    "slimpipe": ("none stated for this order", None, "with n slices `1 + 2 (p-1) / (n v)`", 1 + 14 / 32),
    "chronos": ("none in its abstract", None, "none in its abstract", None),
    "pipeoffload": ("none in its abstract", None, "below a half, if a half is offloaded", None),
    "sppo": ("`3 (p-1) / n`, for n = 4 slices", 5.25, "none without its copies", None),
    "dynapipe": ("`3 (p-1)`", 21, "the cap", None),
}
"""By schedule: bubble and memory as the paper states them, each with its value for `RANKS` and `MICROBATCHES`."""
SLICES = {"slimpipe": 16, "terapipe": 4, "sppo": 4}
"""Slices of every sequence in the table of claims; 1 for the others."""
HEAD = """\
<!-- Written by `python -m scripts.bench.orders --page docs/schedules.md`: change scripts/bench/orders/page.py instead. -->

# Schedules

Every schedule here is a planner: it makes plans in the same language, which the same `check` proves and the same runtime runs.
`megatron-epp schedules` lists them, `megatron-epp compare --planner all` ranks them for your batch, model, cluster and cap,
and `--epp-planner NAME` trains with one. Each is a file of 20 to 150 lines in `megatron_epp/planner/schedules/`, whose first
lines say what it keeps of its paper and what it changes. [A schedule of your own](your-own-schedule.md) is as short.

Papers state an order for equal microbatches. Here the microbatches are chunks: whole sequences, slices of long ones, and short
ones packed. Each schedule is given several chunk tables and the recompute that the memory cap requires, and its fastest plan
counts.

## Claimed, and here

With {microbatches} equal microbatches on {ranks} ranks, where F, B and W of a microbatch take one unit of time each on a rank:
bubble is the idle time of a rank in these units, memory the largest number of microbatches whose activations a rank holds. `p`
are the ranks, `m` the microbatches, `v` = 2 the stages of a rank. The column "here" counts idle time until the last rank ends,
since the optimizer waits for all ranks. ZB-H2 and ZB-V count it only between the first and last action of each rank ("0 between
a rank's ends"), so their claim is lower. PipeOffload and SPPO are without their copies. `tests/pure/test_schedules.py` and
`tests/pure/test_schedules_by_lengths.py` hold the formulas, for other sizes too, and what these two keep with copies.

"""
LAYOUTS = """\
AdaPtis (2509.23722) chooses the layers of the stages, their ranks and the order together, from costs of single layers. Planners
are given layers and ranks, so AdaPtis is not one of them: [`megatron-epp layout`](layouts.md) chooses both, and plans the best
few with the default planner, which chooses order, split weight gradients, recompute and copies. AdaPtis begins with a known
pipeline and changes one of the three where its bottleneck is; the search here bounds all placements, moves layers away from the
busiest rank, and plans the best. It assigns stages looped or in a V only, not to any rank.
"""


def claims() -> str:
    """Format the table of what papers claim and what our versions do."""
    rows = []
    for name, (bubble, waits, memory, kept) in CLAIMS.items():
        unit = Unit(name, RANKS, MICROBATCHES, SLICES.get(name, 1))
        made = unit.of_paper()
        said = [bubble if waits is None else f"{bubble} = {waits:g}", memory if kept is None else f"{memory} = {kept:.3g}"]
        source = SCHEDULES[name].source
        rows.append([f"`{name}`", source, said[0], f"{unit.waits(made):g}", said[1], f"{unit.kept(made):.3g}"])
    rows.append(["`megatron-epp layout`", "AdaPtis, 2509.23722", "none for equal layers", "below", "none", "below"])
    return table(["schedule", "source", "bubble, claimed", "here", "memory, claimed", "here"], rows)


def gallery(rows: Sequence[dict[str, Any]]) -> str:
    """Format the makespans of all orders over greedy's, with a column for every batch and cap."""
    cases = list(dict.fromkeys((row["batch"], row["cap_gib"]) for row in rows))
    ratios = {(row["order"], row["batch"], row["cap_gib"]): row["ratio"] for row in rows}
    lines = []
    for name in dict.fromkeys(row["order"] for row in rows):
        found = [ratios.get((name, *case)) for case in cases]
        lines.append([f"`{name}`", *("no plan" if ratio is None else f"{ratio:.3f}" for ratio in found)])
    return table(["schedule", *(f"{batch}, {cap} GiB" for batch, cap in cases)], lines)


def picture(path: Path) -> None:
    """Draw every schedule for few microbatches, one below the other."""
    sizes = {name: 4 if name in SLICES else 1 for name in CLAIMS}
    plans = [(name, Unit(name, DRAWN_RANKS, DRAWN_MICROBATCHES, slices).plan()) for name, slices in sizes.items()]
    side_by_side(plans).savefig(path, dpi=80)


def page(rows: Sequence[dict[str, Any]], drawn: str) -> str:
    """Return the whole page.

    Args:
        rows: figures of all orders on all batches.
        drawn: name of the picture.
    """
    return f"""{HEAD.format(microbatches=MICROBATCHES, ranks=RANKS)}{claims()}

{LAYOUTS}
## In a picture

{DRAWN_MICROBATCHES} equal microbatches on {DRAWN_RANKS} ranks, with the same units of time; those of SlimPipe, TeraPipe
and SPPO are in four slices. Weight gradients, where they are actions of their own, are green.

![The schedules, one below the other]({drawn})

## On three batches

`python -m scripts.bench.orders`: Llama 3 8B on 8 ranks, on paper. Makespan over that of the default planner with the same
placement, cap and options: above 1 the schedule is slower. Columns are batch and memory cap per rank: "64 x 8K" are 64
sequences of 8,192 tokens, "512 Wikipedia, one of 64K" are 512 sequences with lengths drawn like Wikipedia's and one of 64K
tokens, "1M and 500 tiny" (context parallel size 2) are one of 1M tokens and 500 short ones. "no plan": the schedule does not
fit under the cap, whatever is recomputed. `interleaved, 4` has four stages per rank, `interleaved` two.

{gallery(rows)}

## Tables of torch.distributed.pipelining

`megatron-epp check table.csv` reads the tables of `torch.distributed.pipelining` (a row per rank, cells such as `0F3`, `7I0`,
`4W2`, `(0F7;7B3)OVERLAP_F_B`) and proves them like plans: every forward and backward is there once, nothing runs before what it
needs, the order of sends matches that of receives, and there is no deadlock, even with a GPU's in-order hardware queues. It
prints the bubble if every action takes the same time, and the largest number of microbatches in flight on a rank. Cells for
communication are left out, since messages follow from the order.
"""
