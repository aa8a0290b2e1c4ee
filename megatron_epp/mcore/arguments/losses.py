"""Checks of a loss of the user's and its samples."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

_DATA = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")


def loss_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the settings that are incompatible with `--epp-samples` and `--epp-loss`.

    Raises:
        EppError: there is no such loss.
    """
    if args.epp_samples is None:
        if args.epp_loss is not None:
            yield "--epp-loss needs the samples that the loss is of: add --epp-samples FILE"
        return
    data_flags = [f"--{name.replace('_', '-')}" for name in _DATA if getattr(args, name, None)]
    if data_flags:
        yield f"--epp-samples takes the place of {data_flags[0]}: leave one of them out"
    if len(args.epp_samples) > 2:
        yield f"--epp-samples takes a file for training and one for evaluation, not {len(args.epp_samples)}"
    if args.epp_schedule != "elastic":
        yield f"--epp-samples is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    if args.epp_loss is not None:
        yield from _of_loss(args)


def _of_loss(args: argparse.Namespace) -> Iterator[str]:
    from megatron_epp.losses import Average, load_loss

    loss = load_loss(args.epp_loss)
    if args.epp_vocab_parallel != "off":
        yield "--epp-loss needs the output layer on the last stage: leave out --epp-vocab-parallel"
    if getattr(args, "mtp_num_layers", None):
        yield "--epp-loss trains no multi-token prediction: leave out --mtp-num-layers"
    if getattr(loss, "has_values", False) and not args.untie_embeddings_and_output_weights:
        yield (
            f"--epp-loss {args.epp_loss} reads values, of a head in the place of the output layer: pass "
            "--untie-embeddings-and-output-weights"
        )
    routers = [
        name
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")
        if getattr(args, "num_experts", None) and any(numbers(getattr(args, name, None)))
    ]
    if routers and loss.average is not Average.TOKENS:
        flag = routers[0].replace("_", "-")
        yield (
            f"--epp-loss {args.epp_loss} is divided by sequences, and the losses of routers by tokens: pass --{flag} 0, or a "
            "loss with Average.TOKENS"
        )


def numbers(coefficients: Any) -> list[float]:
    """Return a coefficient, or the coefficients of several kinds of losses, as a list."""
    values = coefficients if isinstance(coefficients, (list, tuple)) else [coefficients]
    return [float(value) for value in values if value is not None]
