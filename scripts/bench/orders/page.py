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

Every schedule here is a planner: it makes plans in the same language, which the same `check` proves and, but for [a
few](#planned-not-run), the same runtime runs. `megatron-epp schedules` lists them, `megatron-epp compare --planner all` ranks
them for your batch, model, cluster and cap, and `--epp-planner NAME` trains with one. Each is a file of less than 200 lines
in `megatron_epp/contrib/papers/`, most of less than 100, except InfiniPipe, HelixPipe and the exact planner, which are
folders. Its first lines say what it keeps of its paper and what it changes. [A schedule of your own](your-own-schedule.md) is
as short as most.

Papers state an order for equal microbatches. Here the microbatches are chunks: whole sequences, slices of long ones, and short
ones packed. Each schedule is given several chunk tables and the recompute that the memory cap requires, and its fastest plan
counts.

## Claimed, and here

With {microbatches} equal microbatches on {ranks} ranks, where F, B and W of a microbatch take one unit of time each on a rank:
bubble is the idle time of a rank in these units, memory the largest number of microbatches whose activations a rank holds. `p`
are the ranks, `m` the microbatches, `v` = 2 the stages of a rank. The column "here" counts idle time until the last rank ends,
since the optimizer waits for all ranks. ZB-H2 and ZB-V count it only between the first and last action of each rank ("0 between
a rank's ends"), so their claim is lower. Counted so, ZB-H2 has none here either, and ZB-V up to 3.5 on the first ranks; until
the last rank ends it waits no longer than its authors' order. DualPipeV's formulas are those of DualPipe for twice as many
stages as ranks; there a forward and a backward overlap, which here run one after the other. PipeOffload, SPPO and ChronosPipe
are without their copies. For HelixPipe half of each pass is attention, so that `t_pre + t_post` of a layer is a quarter; the
formula is derived from its order. `tests/pure/test_schedules.py` and `tests/contrib` hold the formulas, for other sizes too,
and what PipeOffload, SPPO and ChronosPipe keep with copies.

The last rows are of planners that choose chunks, layouts or orders themselves, with the figures of
`tests/contrib/test_schedules_of_papers.py`. Seq1F1B and InfiniPipe cut each microbatch into n = 4 slices. ChunkFlow's are of
the four sequences of its paper, of 4, 2, 1 and 1 units on 4 ranks, where the bubble of 1F1B is 57.1 %. Here the longest
sequence comes first, which makes the bubble smaller. In the paper's order it is 47.8 %, as claimed, and with K = 1 55.6 %,
since recompute waits for the gradient. OptPipe's are proven optima of 4 microbatches on 4 ranks, in a V, with half of the
memory of 1F1B.

"""

PLANNED = """\
## Planned, not run

Two systems divide work in ways that training does not know. The plan language says them, so that they can be proven, simulated
and compared; `--epp-planner` refuses them. Figures are by formula, for Llama 3 8B on nodes of 8 H100s.

**HelixPipe** (`helixpipe`, 2507.00394) puts the attention of a layer, which has no weights, on another rank for each
microbatch: operation `A` and its backward `G` have sites whose actions run on any rank, and messages of their own. Then no
rank waits for attention while the pipeline fills, and a stage is one layer, so that the bubble grows neither with attention
nor with the layers of a rank. But all forwards run before all backwards, so a rank keeps its share of every microbatch of the
batch: that is why it fits none of the caps above. With 16 sequences of 131,072 tokens on 8 pipeline ranks of 8
tensor-parallel ranks, and 72 GiB, it takes 0.81 times as long as 1F1B and 0.93 times as long as two interleaved stages, all
with whole sequences (`--slices 1`; bubbles of 16, 36 and 27 %). With slices, greedy takes 0.93 times as long as HelixPipe and
a third of its memory, so running it would gain nothing here: slices shorten the bubble, too.

```bash
yes 131072 | head -16 > long.txt
megatron-epp compare --lengths long.txt --model llama3-8b --cluster h100x8 --stages 8 --tensor-model-parallel-size 8 \\
  --sequence-parallel --data-parallel 8 --memory-gb 72 --layout even --planner helixpipe --planner greedy \\
  --planner interleaved --planner 1f1b-sliced  # and the same with --slices 1
```

Running it would take model chunks that begin and end inside attention, handlers of `A` and `G` that attend without a layer,
links between all pairs of ranks, and checkpoints of blocks that Megatron's own layers can read.

**FlexSP** (`flexsp`, 2412.01523) gives every sequence a context-parallel degree: short ones share few ranks, long ones many, at
the same time. A chunk has groups of its context-parallel ranks (`ContextGroups`), each with some of its sequences; it
takes as long as the slowest group, and its bytes are those of the fullest rank. `check` finds groups that overlap, leave a
sequence out, or are too small for the bytes of their steps. Llama 3 8B on 4 pipeline ranks, sequences of up to 131,072 tokens
(`python -m scripts.bench.orders.groups`), median of the batches; below 1 groups are faster:

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

"One degree" are the same microbatches of whole sequences shared by all ranks. Inside a node exchanges are cheap, and groups
gain at most 1 %; between nodes they save 1 to 10 %. Greedy cuts long sequences into slices, which groups cannot share, and
that gains more in a pipeline, except for many short sequences over several nodes: there groups would take 4 % off.

Running it would take communicators for every group that occurs, attention that knows the group of each sequence, rows of
batches divided by group instead of evenly, and a loss that weighs the ranks by their tokens.

"""
LAYOUTS = """\
AdaPtis (2509.23722) chooses the layers of the stages, their ranks and the order together, from costs of single layers. Planners
are given layers and ranks, so AdaPtis is not one of them: [`megatron-epp plan --layout auto`](layouts.md) chooses both, and
plans the best few with the default planner, which chooses order, split weight gradients, recompute and copies. AdaPtis begins
with a known pipeline and changes one of the three where its bottleneck is; the search here bounds all placements, moves layers
away from the busiest rank, and plans the best. It assigns stages looped or in a V only, not to any rank.
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


def bubbles_and_peaks(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table for every batch: bubble and peak of all orders, with a column for every cap.

    The default planner, with one stage per rank and no options, is the first line.
    """
    tables = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        own = [row for row in rows if row["batch"] == batch]
        caps = list(dict.fromkeys(row["cap_gib"] for row in own))
        lines = {row["order"]: dict.fromkeys(caps, "no plan") for row in own}
        usual = dict.fromkeys(caps, "no plan")
        for row in own:
            if row["bubble"] is not None:
                lines[row["order"]][row["cap_gib"]] = _bubble_and_peak(row["bubble"], row["peak_gib"])
            if row["order"] == "gpipe" and row["greedy_bubble"] is not None:  # a plain order of one stage per rank
                usual[row["cap_gib"]] = _bubble_and_peak(row["greedy_bubble"], row["greedy_peak_gib"])
        cells = [[f"`{name}`", *by_cap.values()] for name, by_cap in lines.items()]
        if "gpipe" in lines:
            cells.insert(0, ["the default planner", *usual.values()])
        tables.append(table([batch, *(f"{cap} GiB" for cap in caps)], cells))
    return "\n\n".join(tables)


def _bubble_and_peak(bubble: float, peak_gib: float) -> str:
    return f"{100 * bubble:.1f} %, {peak_gib:.1f}"


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
        drawn, batches: as `with_tables` takes them.
    """
    return with_tables(gallery(rows), bubbles_and_peaks(rows), drawn, batches)


def with_tables(makespans: str, peaks: str, drawn: str, batches: Mapping[str, int]) -> str:
    """Return the whole page around the tables that take hours to plan.

    Args:
        makespans: as `gallery` formats them.
        peaks: as `bubbles_and_peaks` formats them.
        batches: those that are drawn, with the memory cap in GiB.
    """
    pictures = "\n\n".join(f"![{batch} under {cap} GiB]({drawing(batch)})" for batch, cap in batches.items())
    return f"""{HEAD.format(microbatches=MICROBATCHES, ranks=RANKS)}{claims()}

{LAYOUTS}
## Steps of two actions

STP runs a forward and a backward of one stage in one step (`7F5+7B4` in a plan), or a forward and a weight gradient, or two
forwards: while one of the two exchanges activations between tensor-parallel ranks, the other computes. Its memory above is
that with weight gradients split off, whose inputs count; with whole backwards it is `(3 p + 1) / 2` = 12.5.

A plan counts for such a step the larger of the first action's exchange and the second one's compute, plus the larger of the
second one's exchange and the first one's compute. Recompute counts as compute. Memory counts both actions at once, and the
working memory of both.

In training the two actions have a thread each and take turns: one launches work until it has begun an exchange, then the other
does. So parts of a forward's layers alternate on the compute stream with parts of a backward's, and every exchange is
overlapped with the other action. It has been run with Megatron's own layers on CPUs, where gradients equal those of Megatron's
schedule; not yet with Transformer Engine's layers or on GPUs, where the gain is to be measured. With sequence parallelism the
gathers ahead of a linear layer are not overlapped, since their buffer is shared by all layers.

With `--overlap-exchanges` (`--epp-overlap-exchanges`) the default planner has such steps, too: in its fastest orders it joins
neighbouring actions where that is faster, backwards or weight gradients with forwards, and forwards with each other. On paper,
Llama 3 8B on 8 ranks of TP 8, 64 sequences of 8K under 80 GiB take 19 % less time so (16 % with weight gradients split off),
512 like Wikipedia's and one of 64K under 40 GiB 15 % less; with TP 4 it is 5 to 7 %, with TP 2 1 to 2 %. The ratios below
compare STP with that, at its own placement, where STP needs 3 % more time; with one stage per rank, where every backward is
followed by a forward, the default planner needs 9 % less time than STP at TP 8.

In some trainings the two actions run one after the other, and the simulated time is too short: with experts,
`--hidden-dropout`, `--tp-comm-overlap` and `--timing-log-level 2`, for which rank 0 logs the reason; with KV offload; and with
a script's own microbatches. Without tensor parallelism there is nothing to overlap. Activations are not offloaded.

## In a picture

{DRAWN_MICROBATCHES} equal microbatches on {DRAWN_RANKS} ranks, with the same units of time; those of SlimPipe, TeraPipe and
SPPO are in four slices. STP needs {fewest("stp", DRAWN_RANKS)}; a box such as `7.5+7.4` is a step of two actions, in the
colour of the first. Weight gradients, where they are actions of their own, are green.

![The schedules, one below the other]({drawn})

## On three batches

`python -m scripts.bench.orders`: Llama 3 8B on 8 ranks, on paper. Makespan over that of the default planner with the same
placement, cap and options (for HelixPipe with one stage per rank): above 1 the schedule is slower. Columns are batch and memory
cap per rank: "64 x 8K" are 64 sequences of 8,192 tokens, "512 Wikipedia, one of 64K" are 512 sequences with lengths drawn like
Wikipedia's and one of 64K tokens, "1M and 500 tiny" (context parallel size 2) are one of 1M tokens and 500 short ones. "TP 8"
is with tensor parallel size 8, whose exchange STP hides, and the default planner where it is compared with STP. "no plan":
the schedule does not fit under the cap, whatever is recomputed, or has too few chunks. SlimPipe cuts every sequence that is as
long as the longest into at least as many slices as there are ranks, however short: in the first four columns they have 1,024
tokens, a fifth of whose forward is fixed time, and with TP 8 the host takes longer to launch a pass than the device to run it.
`interleaved, 4` has four stages per rank, `interleaved` two. Bold: the fastest plans of the column, within 0.5 %; which of
them is faster than another in the same column the ratios do not say, as their placements differ. [How it
compares](comparison.md#against-the-best-there-is) has zero-bubble schedules and greedy against proven optima, which are what
OptPipe looks for.

{makespans}

Bubble, the idle share of all ranks until the last one ends, and peak of the fullest rank in GiB, weights and optimizer
included, by batch and cap. A small bubble is no fast plan where recompute fills it.

{peaks}

The same plans in pictures, under the middle cap, the fastest first, and without those that take half as long again. Titles have
makespan, bubble, recompute and peak.

{pictures}

{PLANNED}## Tables of other systems

`megatron-epp check` reads the tables of `torch.distributed.pipelining` (`table.csv`: a row per rank, cells such as `0F3`,
`7I0`, `4W2`, `(0F7;7B3)OVERLAP_F_B`), those that AMD's Primus logs (`Rank 0: (F|0|0),(SF|0|0),…`), and those that the
zero-bubble fork of Megatron prints (`f0 sf0 b0 w0` with communication, `F0.1 BW0.1` or `F0-1 BW0-1` without), and proves them
like plans: every forward and backward is there once, nothing runs before what it needs, the order of sends matches that of
receives, and there is no deadlock, even with a GPU's in-order hardware queues. It prints the bubble if F, B and W take
equally long, and the largest number of microbatches in flight on a rank. Copies and recompute are left out. Sends and receives
that a table of torch has (`0SEND_F1`, `1RECV_F1`) are proven as they stand: none is missing, each is after what it sends and
before what needs it, both ends agree on the order, and no rank waits for another for ever on one hardware queue. In the other
tables messages follow from the order of the passes. Torch's older notation, with `B` next to `W` for the part of a backward
without weight gradients and `BW` for a whole one, is read too. Other lines before and after the rows of zero-bubble and Primus
are skipped. Where two stages of a rank may be looped or a V, the table does not say which; it is the one with fewer violations.
"""
