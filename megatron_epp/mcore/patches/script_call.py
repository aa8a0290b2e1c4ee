"""Checks of a training script's arguments to Megatron's `pretrain`: those that `--epp` would not use are refused."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.training import global_vars

from megatron_epp.mcore.patches.stock_functions import EMBEDDING_RANKS, FORWARD_STEP, PROVIDER, require_stock
from megatron_epp.plan.errors import EppError

_REFUSED = ("process_non_loss_data_func", "p2p_communicator")
"""Arguments that Megatron passes to schedules and that ours does not support."""
_given: Mapping[str, Any] | None = None


@contextlib.contextmanager
def checked(given: Mapping[str, Any]) -> Iterator[None]:
    """Check the arguments of a `pretrain` that runs in this context: at once, or when it has parsed the flags itself (0.17)."""
    global _given
    _given = given
    try:
        if global_vars._GLOBAL_ARGS is not None:
            check(global_vars._GLOBAL_ARGS)
        yield
    finally:
        _given = None


def check(args: argparse.Namespace) -> None:
    """Raise `EppError` for arguments of a running `pretrain` that are incompatible with these flags."""
    if _given is None or not getattr(args, "epp", False):
        return
    for name in _REFUSED:
        if _given.get(name) is not None:
            raise EppError(f"--epp cannot honour {name} of pretrain: leave it out, or start without --epp")
    functions = {FORWARD_STEP: _given["forward_step_func"], PROVIDER: _given["train_valid_test_dataset_provider"]}
    if args.epp_placement != "looped" and _given.get("get_embedding_ranks") is not None:  # the placement says which they are
        functions[EMBEDDING_RANKS] = _given["get_embedding_ranks"]
    require_stock(functions)
