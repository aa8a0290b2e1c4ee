"""Checks that processes and sequences divide over ranks and that all layers can run, from the arguments, before start-up."""

from __future__ import annotations

import argparse

from megatron_epp.launch.command import REPLICA_SIZES, world_of
from megatron_epp.mcore.arguments.errors import ArgumentError

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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
