"""Checks before start-up that processes, sequences and experts divide over ranks, and that all layers can run."""

from __future__ import annotations

import argparse

from megatron_epp.launch.command import REPLICA_SIZES, world_of
from megatron_epp.mcore.arguments import ArgumentError

_REFUSED_LAYERS = {
    "M": "state-space (Mamba)",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    "+": "multi-latent attention",
    "E": "mixture-of-experts",
    "/": "multi-token prediction",
}
"""Names of layer types that cannot run, by their symbol in `--hybrid-layer-pattern`.

Attention (``*``) and MLP (``-``) layers can: keys and values are all the state that slices pass on.
"""
_BALANCING = frozenset(("aux_loss", "seq_aux_loss", "sinkhorn", "none"))
"""Load-balancing types that look at one chunk at a time; any other would need replicas that run their chunks in lockstep."""


def check_layout(args: argparse.Namespace) -> None:
    """Raise `ArgumentError`, with flags and numbers, if a run's processes or sequences do not divide evenly over replicas."""
    replica = world_of(vars(args))
    names = [f"{_flag(name)} {getattr(args, name)}" for name in REPLICA_SIZES]
    if args.world_size % replica != 0:
        raise ArgumentError(
            f"the run has {args.world_size} processes, but {' x '.join(names)} takes {replica} for each replica: start a "
            f"multiple of {replica}, or lower one of them"
        )
    replicas = args.world_size // replica
    for name in ("global_batch_size", "eval_global_batch_size"):  # up to 0.17 there is but one
        batch = getattr(args, name, None)
        if batch is None or (batch > 0 and batch % replicas == 0):
            continue
        raise ArgumentError(
            f"{_flag(name)} {batch} does not divide over {replicas} data-parallel replicas ({args.world_size} processes, "
            f"{replica} each): make it a multiple of {replicas}"
        )


def check_pattern(pattern: str | None) -> None:
    """Raise `ArgumentError` for a hybrid model with layers whose state cannot be passed from slice to slice.

    Args:
        pattern: the value of `--hybrid-layer-pattern`; None where a model has none, and so has its default layers.
    """
    if pattern is None:
        raise ArgumentError("--epp needs --hybrid-layer-pattern to know the layers of a hybrid model; only * and - can run")
    refused = [f"{name} ({symbol})" for symbol, name in _REFUSED_LAYERS.items() if symbol in pattern]
    if refused:
        raise ArgumentError(
            f"--epp cannot run {', '.join(refused)} layers of --hybrid-layer-pattern {pattern}: slices of a sequence hand on "
            "keys and values, and no other state yet; attention (*) and MLP (-) layers can run"
        )


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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
