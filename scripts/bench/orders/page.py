"""The page of schedules: claims of papers, what our versions do, a picture of each, and a comparison on three batches."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_epp.planner.registry import PLANNERS
from megatron_epp.report.gantt import side_by_side
from scripts.bench.orders.unit import Unit, fewest
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
    "zb-v": ("0 between a rank's ends; its authors' order `(p-1) / 2`", 3.5, "`p`", 8),
    "v-min": ("`2 (p-1)`", 14, "`p/3` and a constant", 8 / 3),
    "v-half": ("`1.5 (p-1)`", 10.5, "`p/2` and a constant", 4),
    "dualpipe-v": ("`p-1`, if F and B do not overlap", 7, "`p + 1/2`", 8.5),
    "stp": ("`(p-1) / 2`, without exchange", 3.5, "`3 p / 2`", 12),
    "hanayo": ("none for more than `p`", None, "none", None),
    "helixpipe": ("two folds: at most `6 (p-1) (t_pre + t_post)`", 10.5, "`m`", 32),
    "slimpipe": ("none stated for this order", None, "with n slices `1 + 2 (p-1) / (n v)`", 1 + 14 / 32),
    "chronos": ("none in its abstract", None, "none in its abstract", None),
    "pipeoffload": ("none in its abstract", None, "below a half, if a half is offloaded", None),
    "sppo": ("`3 (p-1) / n`, for n = 4 slices", 5.25, "none without its copies", None),
    "dynapipe": ("`3 (p-1)`", 21, "the cap", None),
}
"""By schedule: bubble and memory as the paper states them, each with its value for `RANKS` and `MICROBATCHES`."""
OWN_CHUNKS = (
    ("`seq1f1b`", "2406.03488", "`3 (p-1) / n` = 5.25", "5.25", "`(p-1+n) / n` = 2.75", "2.75"),
    ("`infinipipe`", "2509.21275", "`p-1` mean chunks = 5.25", "5.25", "`(p-1+n) / n` = 2.75", "2.75"),
    (
        "`chunkflow`",
        "2503.02356",
        "its example: 47.8 % with K = 2, 54.1 % with K = 1",
        "42.9 %, 50 %",
        "`K` chunks of a sequence",
        "`K`, and layer inputs",
    ),
    ("`flexsp`", "2412.01523", "none: the slowest group as early as possible", "that", "none", "none"),
    (
        "`milp`",
        "OptPipe, 2510.05186",
        "up to half of other schedules' with their memory",
        "5.5; with copies 1.5",
        "the cap",
        "2",
    ),
)
"""Rows of planners that have no order for a given chunk table: schedule, source, and bubble and memory, claimed and here."""
SLICES = {"slimpipe": 16, "terapipe": 4, "sppo": 4}
"""Slices of every sequence in the table of claims; 1 for the others."""
HEAD = """\
<!-- Written by `python -m scripts.bench.orders --page docs/schedules.md`: change scripts/bench/orders/page.py instead. -->

# Schedules

Each of these schedules is a planner, which trains with `--epp-planner NAME`: the same `check` proves its plans and, but for
[two](#planned-not-run), the same runtime runs them. `megatron-epp schedules` lists them, `megatron-epp compare --planner all`
ranks them for your batch, model, cluster and cap. The first lines of its file in `megatron_epp/contrib/papers/` say what a
schedule keeps of its paper and what it changes. [Yours](your-own-schedule.md) can be as short.

Papers state an order for equal microbatches. Here the microbatches are chunks: whole sequences, slices of long ones, and short
ones packed. Each schedule has several chunk tables, the recompute that the cap requires, and its fastest plan counts.

## Claimed, and here

With {microbatches} equal microbatches on {ranks} ranks, where F, B and W of a microbatch take one unit of time each on a rank,
bubble is the idle time of a rank in these units, memory the largest number of microbatches whose activations a rank holds. `p`
are the ranks, `m` the microbatches, `v` = 2 the stages of a rank.

- "Here" counts idle time until the last rank ends, since the optimizer waits for all. ZB-H2 and ZB-V count it between the first
  and last action of each rank; so counted ZB-H2 has none here either, and ZB-V up to 3.5 on the first ranks.
- DualPipeV's formulas are those of DualPipe for twice as many stages as ranks, where a forward and a backward overlap; here
  they run one after the other.
- PipeOffload, SPPO and ChronosPipe are without their copies.
- For HelixPipe half of each pass is attention, so `t_pre + t_post` of a layer is a quarter; the formula is derived from its
  order.
- Seq1F1B and InfiniPipe cut each microbatch into n = 4 slices.
- ChunkFlow's are of the four sequences of its paper, on 4 ranks. Here the longest comes first, which makes the bubble
  smaller; in the paper's order it is 47.8 %, as claimed, and with K = 1 55.6 %, since recompute waits for the gradient.
- OptPipe's are proven optima of 4 microbatches on 4 ranks, in a V, with half of the memory of 1F1B.

`tests/pure/test_schedules.py` and `tests/contrib` hold these figures, for other sizes too.

"""

PLANNED = """\
## Planned, not run

Two systems divide work in ways that training does not know. Their plans are proven, simulated and compared, and
`--epp-planner` refuses them. Figures are by formula, for Llama 3 8B on nodes of 8 H100s.

**HelixPipe** (`helixpipe`, 2507.00394) puts the attention of a layer, which has no weights, on another rank for each
microbatch (operations `A` and `G`). So no rank waits for attention while the pipeline fills. But all forwards run before all
backwards, and a rank keeps its share of every microbatch: it fits none of the caps above. With 16 sequences of 131,072 tokens
on 8 pipeline ranks of 8 tensor-parallel ranks, and 72 GiB, it takes 0.81 times as long as 1F1B and 0.93 times as long as two
interleaved stages, all with whole sequences (`--slices 1`). With slices, greedy takes 0.93 times as long as HelixPipe and a
third of its memory.

```bash
yes 131072 | head -16 > long.txt
megatron-epp compare --lengths long.txt --model llama3-8b --cluster h100x8 --stages 8 --tensor-model-parallel-size 8 \\
  --sequence-parallel --data-parallel 8 --memory-gb 72 --layout even --planner helixpipe --planner greedy \\
  --planner interleaved --planner 1f1b-sliced  # and the same with --slices 1
```

**FlexSP** (`flexsp`, 2412.01523) gives every sequence a context-parallel degree: short ones share few ranks, long ones many,
at the same time. A chunk (`ContextGroups`) takes as long as its slowest group, and the bytes of its fullest rank. Llama 3 8B
on 4 pipeline ranks, sequences of up to 131,072 tokens (`python -m scripts.bench.orders.groups`), median of the batches, over
the same microbatches shared by all ranks and over greedy; below 1 groups are faster:

| context-parallel ranks | lengths like | over one degree | over greedy |
| --- | --- | --- | --- |
| 8, one node | Wikipedia | 0.994 | 1.056 |
| 8, one node | code | 0.999 | 1.152 |
| 8, one node | chats | 1.000 | 1.393 |
| 16, two nodes | Wikipedia | 0.938 | 0.964 |
| 16, two nodes | code | 0.969 | 1.117 |
| 16, two nodes | chats | 0.994 | 1.342 |
| 32, four nodes | Wikipedia | 0.898 | 0.961 |
| 32, four nodes | code | 0.940 | 1.257 |
| 32, four nodes | chats | 0.989 | 1.170 |

Inside a node exchanges are cheap, and groups gain at most 1 %; between nodes they save 1 to 10 %. Greedy's slices, which groups
cannot share, gain more, except for many short sequences over several nodes.

"""
LAYOUTS = """\
AdaPtis (2509.23722) chooses layers, ranks and order together. Planners are given layers and ranks;
[`megatron-epp plan --layout auto`](memory-and-speed.md#layouts) chooses these, and plans the best few with the default planner.
AdaPtis changes a known pipeline where its bottleneck is. The search here bounds all placements, looped or in a V, and moves
layers away from the busiest rank.
"""


def claims() -> str:
    """Format the table of what papers claim and what our versions do."""
    rows = []
    for name, (bubble, waits, memory, held) in CLAIMS.items():
        unit = Unit(name, RANKS, MICROBATCHES, SLICES.get(name, 1))
        decisions = unit.of_paper()
        said = [bubble if waits is None else f"{bubble} = {waits:g}", memory if held is None else f"{memory} = {held:.3g}"]
        source = PLANNERS.entries()[name].source
        rows.append([f"`{name}`", source, said[0], f"{unit.waits(decisions):g}", said[1], f"{unit.alive(decisions):.3g}"])
    rows.extend(map(list, OWN_CHUNKS))
    rows.append(["`plan --layout auto`", "AdaPtis, 2509.23722", "none for equal layers", "below", "none", "below"])
    return table(["schedule", "source", "bubble, claimed", "here", "memory, claimed", "here"], rows)


def gallery(rows: Sequence[dict[str, Any]]) -> str:
    """Format the makespans of all orders over greedy's, with a column for every batch and cap; the fastest are bold."""
    cases = list(dict.fromkeys((row["batch"], row["cap_gib"]) for row in rows))
    ratios = {(row["order"], row["batch"], row["cap_gib"]): row["ratio"] for row in rows}
    took = {case: [row["makespan_us"] for row in rows if (row["batch"], row["cap_gib"]) == case] for case in cases}
    best = {case: min(filter(None, all_us), default=0.0) for case, all_us in took.items()}
    fast = {
        (row["order"], row["batch"], row["cap_gib"])
        for row in rows
        if row["makespan_us"] is not None and row["makespan_us"] <= 1.005 * best[row["batch"], row["cap_gib"]]
    }
    lines = []
    for name in dict.fromkeys(row["order"] for row in rows):
        cells = []
        for case in cases:
            ratio = ratios.get((name, *case))
            text = "no plan" if ratio is None else f"{ratio:.3f}"
            cells.append(f"**{text}**" if (name, *case) in fast else text)
        lines.append([f"`{name}`", *cells])
    return table(["schedule", *(f"{batch}, {cap} GiB" for batch, cap in cases)], lines)


def picture(path: Path) -> None:
    """Draw every schedule for few microbatches, one below the other."""
    sizes = {name: 4 if name in SLICES else 1 for name in CLAIMS}
    count = {name: max(DRAWN_MICROBATCHES, fewest(name, DRAWN_RANKS)) for name in sizes}
    plans = [(name, Unit(name, DRAWN_RANKS, count[name], slices).plan()) for name, slices in sizes.items()]
    side_by_side(plans).savefig(path, dpi=80)


def drawing(batch: str) -> str:
    """Return the name of the picture of a batch."""
    return f"schedules-{'-'.join(re.findall(r'[a-z0-9]+', batch.lower()))}.png"


def page(rows: Sequence[dict[str, Any]], drawn: str, batches: Mapping[str, int]) -> str:
    """Return the whole page.

    Args:
        drawn, batches: as `with_table` takes them.
    """
    return with_table(gallery(rows), drawn, batches)


def with_table(makespans: str, drawn: str, batches: Mapping[str, int]) -> str:
    """Return the whole page around the table that takes hours to plan.

    Args:
        makespans: as `gallery` formats them.
        batches: those that are drawn, with the memory cap in GiB.
    """
    pictures = "\n\n".join(f"![{batch} under {cap} GiB]({drawing(batch)})" for batch, cap in batches.items())
    return f"""{HEAD.format(microbatches=MICROBATCHES, ranks=RANKS)}{claims()}

{LAYOUTS}
## Steps of two actions

STP runs two actions of one rank in one step (`7F5+7B4` in a plan): a forward with a backward, a weight gradient or another
forward. While one exchanges activations between tensor-parallel ranks, the other computes. A plan counts for such a step the
larger of the first one's exchange and the second one's compute, plus the larger of the second one's exchange and the first
one's compute, and both memories at once. STP's memory above is with weight gradients split off, whose inputs count; with
whole backwards it is `(3 p + 1) / 2` = 12.5.

In training the two actions have a thread each and take turns: one launches work until it has begun an exchange, then the other
does. With sequence parallelism the gathers ahead of a linear layer are not overlapped, since all layers share their buffer.
[What has run on a GPU, and what has not](first-hour.md#what-has-run-on-a-gpu).

With `--overlap-exchanges` (`--epp-overlap-exchanges`) the default planner joins neighbouring actions where that is faster. On
paper, Llama 3 8B on 8 ranks of TP 8, 64 sequences of 8K under 80 GiB take 19 % less time so, 512 like Wikipedia's and one of
64K under 40 GiB 15 % less; with TP 4 it is 5 to 7 %, with TP 2 1 to 2 %. Below STP is compared with that at its own
placement, where it needs 3 % more time; with one stage per rank the default planner needs 9 % less time than STP at TP 8.

The two actions run one after the other, and the simulated time is too short, with experts, `--hidden-dropout`,
`--tp-comm-overlap`, `--timing-log-level 2`, KV offload, or a script's own microbatches. Activations are not offloaded.

## In a picture

{DRAWN_MICROBATCHES} equal microbatches on {DRAWN_RANKS} ranks, with the same units of time; those of SlimPipe, TeraPipe and
SPPO are in four slices. STP needs {fewest("stp", DRAWN_RANKS)}; a box such as `7.5+7.4` is a step of two actions, in the
colour of the first. Weight gradients, where they are actions of their own, are green.

![The schedules, one below the other]({drawn})

## On three batches

`python -m scripts.bench.orders`: Llama 3 8B on 8 ranks, on paper. Makespan over that of the default planner with the same
placement, cap and options (for HelixPipe with one stage per rank): above 1 the schedule is slower. Bold are the fastest plans
of a column, within 0.5 %; other ratios of a column do not compare, as placements differ. Columns are batch and memory cap per
rank:

- "64 x 8K": 64 sequences of 8,192 tokens; "TP 8" with tensor parallel size 8, whose exchange STP hides, and the default planner
  where it is compared with STP;
- "512 Wikipedia, one of 64K": 512 sequences with lengths drawn like Wikipedia's and one of 64K tokens;
- "1M and 500 tiny": one of 1M tokens and 500 short ones, context parallel size 2;
- "no plan": it does not fit under the cap, whatever is recomputed, or has too few chunks.

`interleaved, 4` has four stages per rank, `interleaved` two. SlimPipe cuts every sequence as long as the longest into at least
as many slices as there are ranks: of 8K ones slices have 1,024 tokens, a fifth of whose forward is fixed time.
[Figures](comparison.md#against-the-best-there-is) has greedy against proven optima, which are what OptPipe looks for.

{makespans}

The same plans under the middle cap, the fastest first, without those that take half as long again. Titles have makespan,
bubble, recompute and peak of the fullest rank. A small bubble is no fast plan where recompute fills it.

{pictures}

{PLANNED}## Tables of other systems

`megatron-epp check` proves tables of other systems like plans: nothing is missing or runs before what it needs, sends and
receives match, and there is no deadlock, even with a GPU's in-order hardware queues. It reads those of

- `torch.distributed.pipelining` (`table.csv`: a row per rank, cells such as `0F3`, `7I0`, `4W2`, `(0F7;7B3)OVERLAP_F_B`; `B`
  next to `W`, and `BW` for a whole backward, in its older notation), whose sends and receives (`0SEND_F1`, `1RECV_F1`) are
  proven as they stand;
- AMD's Primus (`Rank 0: (F|0|0),(SF|0|0),…`); and
- the zero-bubble fork of Megatron (`f0 sf0 b0 w0` with communication, `F0.1 BW0.1` or `F0-1 BW0-1` without).

In the last two messages follow from the order of the passes. It prints the bubble if F, B and W take equally long, and the most
microbatches in flight on a rank. Copies, recompute and other lines are left out. Where a table may be looped or a V, it is the
one with fewer violations.
"""
