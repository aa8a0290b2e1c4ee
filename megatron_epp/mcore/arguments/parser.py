"""The `--epp-*` flags of Megatron's parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_epp.cost.memory import DEVICE_SHARE, SETUP_MARGIN_BYTES
from megatron_epp.data.sequences import LONG_DOCUMENTS
from megatron_epp.plan.kv_sums import CHOICES, MOST_ROUNDED

TITLE = "elastic pipeline parallelism"


class _Removed(argparse.Action):
    """Refuses a flag that no longer exists. Its help, which is not shown, is the release that removed it, and what to do."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=argparse.SUPPRESS)
        self._advice = help

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} was removed in {self._advice}")


def add_epp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser, once."""
    if any(group.title == TITLE for group in parser._action_groups):
        return parser
    add = parser.add_argument_group(title=TITLE).add_argument
    _add_planning(add)
    _add_data(add)
    _add_memory(add)
    _add_running(add)
    _add_watching(add)
    return parser


def _add_planning(add: Callable[..., Any]) -> None:
    """Add the flags that turn planning on and choose the schedule, the planner and its time budget."""
    add("--epp", action="store_true", help="Plan every iteration from the lengths of its sequences and run the plan.")
    add(
        "--epp-schedule",
        choices=["elastic", "stock", "whole", "padded", "packed"],
        default="elastic",
        help="elastic: our plans. The others run Megatron's own schedule on the same documents, for comparison. stock: one "
        "whole sequence per microbatch, with Megatron's attention; whole: the same with our attention; padded: each "
        "sequence padded to --seq-length; packed: sequences packed up to --seq-length (default: elastic).",
    )
    add(
        "--epp-planner",
        default="greedy",
        metavar="NAME",
        help="Who makes the plans (default: greedy): a planner that `megatron-epp compare` lists, or module:function for "
        "one of your own. milp: greedy, while beside training a solver works on small batches for when their lengths come "
        "again; which plan runs depends on timing, so a resumed run repeats losses only to rounding.",
    )
    add(
        "--epp-plan-budget-ms",
        type=int,
        metavar="MS",
        help="Time for planning a replica's share of a batch, beside the iterations before it: what the planner greedy leaves "
        "of it goes to a local search. How far that gets depends on the machine's load, so a resumed run repeats losses only "
        "to rounding. Default: none; then plans are the same in every run.",
    )


def _add_data(add: Callable[..., Any]) -> None:
    """Add the flag that chooses how long documents become sequences."""
    add(
        "--epp-documents",
        choices=list(LONG_DOCUMENTS),
        default="split",
        help="What becomes of a document longer than --seq-length. split: several sequences of that length and one of what is "
        "left, each by itself, with positions from 0; each begins with the last label of the one before, so that every token "
        "of a document but its first is a label exactly once. truncate: what is beyond --seq-length is left out, and a warning "
        "says how many tokens that are (default: split).",
    )


def _add_memory(add: Callable[..., Any]) -> None:
    """Add the flags that limit memory and control chunk size, slices, recompute and offload."""
    add(
        "--epp-memory-cap-gb",
        type=float,
        metavar="GB",
        help="Memory one rank may hold, weights and optimizer included. "
        f"Default: {100 * DEVICE_SHARE:.0f}%% of the device's; none on CPU. On a GPU no more than is left when libraries and "
        f"communicators are set up, less {SETUP_MARGIN_BYTES >> 30} GiB.",
    )
    add(
        "--epp-fragmentation-share",
        type=float,
        metavar="SHARE",
        help="Of what chunks hold, what plans allow for gaps between an allocator's blocks. Default: 0.05 on GPUs, 0 on CPU.",
    )
    add("--epp-chunk-tokens", type=int, metavar="N", help="Most tokens in one chunk. Default: chosen per batch.")
    add("--epp-slices", type=int, metavar="K", help="Slices of the longest sequence. Default: chosen per batch.")
    add(
        "--epp-recompute",
        default="auto",
        metavar="auto|N",
        help="Layers per stage that recompute in backward: auto (as few as the cap allows, per stage and chunk) or a number. "
        "Takes the place of --recompute-granularity and its kin (default: auto).",
    )
    add(
        "--epp-recompute-levels",
        choices=["all", "whole"],
        default="all",
        help="What a layer that recomputes runs again, with --epp-recompute auto. all: as the plan finds cheapest, the whole "
        "layer, all but its core attention, or its MLP or experts and norms; whole: always the whole layer (default: all).",
    )
    add(
        "--epp-offload",
        nargs="?",
        choices=["on", "off"],
        const="on",
        default="off",
        help="Copy activations to host memory between forward and backward, beside compute, where that costs less time than "
        "recompute, and have keys and values of sliced sequences there where the rest does not fit otherwise (default: off). "
        "Only the planner greedy does so.",
    )
    add(
        "--epp-host-memory-gb",
        type=float,
        metavar="GB",
        help="Host memory that --epp-offload may take per rank. Default: 80%% of the machine's, or of what the control group "
        "of the job or container allows where that is less, shared by the machine's ranks; the log says which.",
    )


def _add_running(add: Callable[..., Any]) -> None:
    """Add the flags that control execution: placement, weight gradients, costs, gradient precision and loss blocks."""
    add(
        "--epp-placement",
        choices=["looped", "v"],
        default="looped",
        help="Where stages go when a rank has several (--num-virtual-stages-per-pipeline-rank and its kin). looped: round the "
        "ranks again and again, as in Megatron's interleaved pipelines; v: there and back again, so that of two stages on each "
        "the first rank has the first and the last (default: looped).",
    )
    add(
        "--epp-split-weight-gradient",
        action="store_true",
        help="Compute the gradient of linear layers' weights apart from the backward, where a stage would wait.",
    )
    add(
        "--epp-costs",
        default="analytic",
        metavar="analytic|measure|FILE",
        help="Where predicted times come from: formulas, a short measurement at start-up (kept with the checkpoints, so that a "
        "resumed run plans alike), or a file (default: analytic).",
    )
    add(
        "--epp-fp32-kv-gradients",
        nargs="?",
        choices=CHOICES,
        const="on",
        default="auto",
        help="Add up the gradients of a sliced sequence's keys and values in fp32: on (or no value), off, or auto, which does "
        f"so where it has more than {MOST_ROUNDED} slices. In bf16 and fp16 every slice rounds the sum otherwise. Takes twice "
        "the memory for them (default: auto).",
    )
    add("--epp-oom-retry", action=_Removed, help="0.2.0: lower --epp-memory-cap-gb or --epp-chunk-tokens")
    add(
        "--epp-loss-block-tokens",
        default="auto",
        metavar="auto|N|0",
        help="Compute logits and loss by blocks of at most N tokens, again in backward, so that a chunk's logits are never "
        "there at once. The price is one more product with the output layer's weight. Liger's kernel does what is between "
        "products where it can (megatron-epp doctor tells), else plain torch. 0: as Megatron does. auto (default): blocks of "
        "1 GiB of fp32 logits where --seq-length tokens have more than 2 GiB of them on a rank, else 0.",
    )


def _add_watching(add: Callable[..., Any]) -> None:
    """Add the flags for lookahead, wait limits, reports and memory measurement."""
    add("--epp-lookahead", type=int, default=2, metavar="N", help="Iterations to plan ahead of training (default: 2).")
    add(
        "--epp-wait-limit-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="End the run, naming the action, when an action, message or collective takes longer (default: 600). Before the "
        "first iteration, where ranks measure costs and wait for each other, so much for every step of the slowest.",
    )
    add("--epp-report-dir", metavar="DIR", help="Write each iteration's planned and measured figures here (default: do not).")
    add(
        "--epp-trace",
        type=int,
        nargs="+",
        metavar="I",
        help="Write iteration I to --epp-report-dir: plan.json, measured.json with the times of every action, copy and wait, "
        "and trace.json for ui.perfetto.dev, measured beside planned, a track for each stream; of several iterations as "
        "plan-I.json and so on (default: none).",
    )
    add("--epp-measure-memory", action="store_true", help="Count the bytes autograd keeps, per rank. Costs a little time.")
    add("--epp-allow-unknown-megatron", action="store_true", help="Patch a Megatron whose code is not known to work.")
