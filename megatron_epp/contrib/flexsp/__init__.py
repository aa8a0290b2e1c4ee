"""FlexSP (arXiv 2412.01523): short sequences on few context-parallel ranks, long ones on many, at the same time."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

NAME = "--epp-planner flexsp"


def problems(args: Namespace) -> Iterator[str]:
    """Yield what does not go with the planner in a training."""
    ranks = args.context_parallel_size
    if ranks < 2 or ranks & (ranks - 1):
        yield f"{NAME} divides 2, 4, 8, ... context-parallel ranks into groups: --context-parallel-size is {ranks}"
    if args.epp_costs == "learn":
        yield f"{NAME} does not go with --epp-costs learn, which takes chunks to be shared by all ranks: use analytic"
    if args.epp_loss is not None:
        yield f"{NAME} does not go with --epp-loss: such a loss gets the tokens of all ranks, which have chunks of their own"
    for flag in ("num_experts", "experimental_attention_variant", "hybrid_layer_pattern", "hybrid_override_pattern"):
        if getattr(args, flag, None):
            yield f"{NAME} does not go with --{flag.replace('_', '-')}: such layers exchange tokens among all ranks"
