"""Steps of two actions, each of which computes while the other exchanges activations between tensor-parallel ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_epp.plan.planners import begins_with_greedy


def flags_against_overlap(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield flags with which the two actions of a step cannot take turns at their exchanges, as they are given, and why."""
    at_a_time = "for one action at a time"
    if args.tensor_model_parallel_size == 1:
        yield "--tensor-model-parallel-size 1", "there is no exchange to overlap"
    if args.num_experts:
        yield (
            f"--num-experts {args.num_experts}",
            f"layers with experts keep what they have sent until it comes back, {at_a_time}",
        )
    for flag, share in (("--hidden-dropout", args.hidden_dropout), ("--attention-dropout", args.attention_dropout)):
        if share:
            yield f"{flag} {share}", "both would draw from one random state"
    if args.tp_comm_overlap:
        yield "--tp-comm-overlap", f"its buffers are {at_a_time}"
    if getattr(args, "fp8", None):
        yield f"--fp8-format {args.fp8}", f"which layers are cast is known {at_a_time}"
    if args.timing_log_level > 1:
        yield f"--timing-log-level {args.timing_log_level}", f"its timers are {at_a_time}"
    if getattr(args, "nvtx_ranges", False):  # 0.18 and later
        yield "--nvtx-ranges", f"its ranges are {at_a_time}"


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what does not go with --epp-overlap-exchanges."""
    if not begins_with_greedy(args.epp_planner):
        yield f"--epp-overlap-exchanges is for --epp-planner greedy, not {args.epp_planner}; leave one of them out"
    for flag, reason in flags_against_overlap(args):
        yield f"--epp-overlap-exchanges does not go with {flag}: {reason}"
