"""What cannot be shared out over ranks, and layers that cannot run: told from the arguments, before anything is started."""

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
"""By symbol of `--hybrid-layer-pattern`. Of attention (``*``) and MLP (``-``) layers slices hand on all there is."""


def check_layout(args: argparse.Namespace) -> None:
    """Raise `ArgumentError`, with the flags and numbers, where the processes or sequences of a run do not divide."""
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
    """Raise `ArgumentError` for a hybrid model with layers whose state slices cannot hand on.

    Args:
        pattern: as `--hybrid-layer-pattern` has it; None where a model has none, and so the layers of its default.
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
