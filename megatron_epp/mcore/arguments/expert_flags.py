"""Megatron's flags for mixture of experts that plans cannot honour."""

from __future__ import annotations

import argparse

from megatron_epp.mcore.arguments.errors import ArgumentError

_BALANCING = frozenset(("aux_loss", "seq_aux_loss", "sinkhorn", "none"))
"""Load-balancing types that look at one chunk at a time; any other would need replicas that run their chunks in lockstep."""


def check_experts(args: argparse.Namespace) -> None:
    """Refuse a model with experts that cannot be trained as asked. Raises `ArgumentError`, which names the flags."""
    ranks = args.expert_model_parallel_size
    if not args.num_experts:
        if ranks > 1:
            raise ArgumentError(f"--expert-model-parallel-size {ranks} is for a model with --num-experts: leave it out")
        return
    if args.num_experts % ranks != 0:
        raise ArgumentError(
            f"--num-experts {args.num_experts} cannot be shared evenly by --expert-model-parallel-size {ranks}: make it a "
            f"multiple of {ranks}"
        )
    if ranks > 1:
        _check_expert_parallel(args, ranks)
    given = args.moe_router_load_balancing_type
    if refused := sorted({given} - _BALANCING if isinstance(given, str) else {*given} - _BALANCING):
        raise ArgumentError(
            f"--epp cannot honour --moe-router-load-balancing-type {' '.join(refused)}; there are "
            + ", ".join(sorted(_BALANCING))
        )


def _check_expert_parallel(args: argparse.Namespace, ranks: int) -> None:
    equal = f"needs equally many tokens on all of --expert-model-parallel-size {ranks} ranks, and chunks differ"
    if args.moe_token_dispatcher_type == "allgather":
        raise ArgumentError(f"--moe-token-dispatcher-type allgather {equal}: use alltoall")
    if args.moe_pad_expert_input_to_capacity:
        raise ArgumentError(f"--moe-pad-expert-input-to-capacity {equal}: leave it out")
    if args.epp_schedule == "packed":
        raise ArgumentError(
            f"--epp-schedule packed gives replicas unequal numbers of microbatches, which --expert-model-parallel-size {ranks} "
            "cannot run: use padded"
        )
    if args.epp_schedule == "elastic" and (args.epp_planner != "greedy" or args.epp_plan_budget_ms is not None):
        raise ArgumentError(
            f"with --expert-model-parallel-size {ranks} replicas are planned together, which only --epp-planner greedy does, "
            "without --epp-plan-budget-ms"
        )
