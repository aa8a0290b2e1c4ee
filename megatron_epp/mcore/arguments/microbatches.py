"""Checks of flags with `--epp-microbatches user`: what a plan for a script's own microbatches cannot honour."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import MegatronFlag, check_conflicts

_ORDER = "leave it out: it belongs to Megatron's own schedules"
_SHAPES = "leave it out: graphs are recorded for the order of Megatron's own schedules"
CONFLICTS = (
    MegatronFlag("--overlap-moe-expert-parallel-comm", advice=_ORDER),
    MegatronFlag("--delay-wgrad-compute", advice=_ORDER),
    MegatronFlag("--defer-embedding-wgrad-compute", advice=_ORDER),
    MegatronFlag("--num-microbatches-with-partial-activation-checkpoints", advice=_ORDER),
    MegatronFlag("--fine-grained-activation-offloading", advice=_ORDER),
    MegatronFlag("--moe-paged-stash", advice=_ORDER),
    MegatronFlag("--cuda-graph-impl", ("none", None), _SHAPES),
    MegatronFlag("--enable-cuda-graph", advice=_SHAPES),
    MegatronFlag("--external-cuda-graph", advice=_SHAPES),
    MegatronFlag("--use-megatron-fsdp"),
    MegatronFlag("--use-torch-fsdp2"),
    MegatronFlag("--hybrid-context-parallel"),
)
_OWN = {
    "--epp-schedule": "elastic",
    "--epp-placement": "looped",
    "--epp-recompute": "auto",
    "--epp-offload": "off",
    "--epp-split-weight-gradient": False,
}
"""Flags of our own that need our layers or our data, and the values that ask for nothing."""


def check_user_microbatches(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` that names all flags that cannot be honoured with a script's own microbatches."""
    check_conflicts(args, CONFLICTS)
    check_settings(vars(args))


def check_settings(given: Mapping[str, object]) -> None:
    """Raise `ArgumentError` if `--epp-*` flags, by their names with underscores, need this package's own data or layers."""
    names = {flag: flag[2:].replace("-", "_") for flag in _OWN}
    if clashes := [f"{flag} {given[name]}" for flag, name in names.items() if given[name] != _OWN[flag]]:
        raise ArgumentError(f"--epp-microbatches user runs the script's own model and data: leave out {', '.join(clashes)}")
