"""Costs stored in files: the file that `--epp-costs` names, and costs learnt earlier, which are kept with the checkpoints.

The first rank of the job reads and decides for all, since a folder may exist on its machine only, or appear late on others.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.cost.blocks import PREDICTION
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.arguments.layout import vocabulary_shares
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.costs.megatron_facts import FORMULAS, Ask, costs_file
from megatron_epp.plan import EppError, Remedy
from megatron_epp.plan.errors import as_setting
from megatron_epp.plan.writing import write_text
from megatron_epp.runtime.links.objects import made_by_first


def named(args: argparse.Namespace, ask: Ask) -> PipelineCosts | None:
    """Return the costs of a pipeline in the file that `--epp-costs` names; None if it names none, or a profile.

    A collective call of all ranks. Raises `EppError` if the file does not exist, or contains neither.
    """
    if (file := costs_file(args)) is None:
        return None
    return made_by_first(lambda: ask(f"{FORMULAS}:pipeline_costs_in", file))


def check_costs(args: argparse.Namespace, costs: PipelineCosts, stages: Sequence[tuple[int, bool]], token_bytes: float) -> None:
    """Raise `EppError` if costs of a whole pipeline from a file are of another precision than this run's, or of other `stages`
    (layers of each, and whether it has multi-token prediction), have the output layer on other ranks, or are of slices that
    hand on latents where this run's do not, or the other way round.
    """
    advice = f"give another file, or learn them ({as_setting(names_of(args)['costs'], 'learn')})"
    of_file = [(own.num_layers, any(block.kind == PREDICTION for block in own.blocks)) for own in costs.stages]
    if of_file != list(stages):
        layers = [", ".join(f"{n}{' and multi-token prediction' * ahead}" for n, ahead in own) for own in (of_file, stages)]
        raise EppError(f"{args.epp_costs} has costs of layers {layers[0]}, and this run has {layers[1]}: {advice}")
    if not math.isclose(costs.hidden_bytes_per_token, token_bytes):
        raise EppError(f"{args.epp_costs} has {other_bytes(costs, token_bytes)}: {advice}")
    of_run, shares = vocabulary_shares(args), () if costs.vocabulary is None else costs.vocabulary.shares
    if len(of_run) != len(shares) or not all(map(math.isclose, of_run, shares)):
        has = "has the output layer on the last stage" if not shares else f"divides the vocabulary by {list(shares)}"
        here = f"divides it by {list(of_run)}" if of_run else "has it on the last stage"
        raise EppError(f"{args.epp_costs} {has}, and this run {here}: {advice}")
    relays_latents = any(stage.kv.expanded_heads for stage in costs.stages)
    if relays_latents != (args.epp_latents == "on"):
        theirs, ours = ("latents", "keys and values") if relays_latents else ("keys and values", "latents")
        raise EppError(
            f"{args.epp_costs} has costs of slices that hand on {theirs}, and this run's hand on {ours}: give another file",
            Remedy("set", "latents", "on" if relays_latents else "off"),
        )


def kept_file(args: argparse.Namespace, name: str) -> Path | None:
    """Return a file that an earlier run kept in the folder of the loaded checkpoint; None if there is none."""
    folder = getattr(args, "load", None)
    return path if folder and (path := Path(folder, name)).exists() else None


def keep_file(args: argparse.Namespace, name: str, text: str) -> None:
    """Write a file to this run's checkpoints, if it saves some, whole or not at all; on the first rank. Raises `EppError`."""
    if not getattr(args, "save", None) or args.rank:
        return
    path = Path(args.save, name)
    try:
        os.makedirs(path.parent, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise EppError(f"cannot write {error.filename or path}: {error.strerror}") from None


def other_bytes(costs: PipelineCosts, token_bytes: float) -> str:
    """Describe costs whose messages differ in size from this run's, as a part of a sentence."""
    return (
        f"costs of messages of {costs.hidden_bytes_per_token:g} bytes per token where this run's take {token_bytes:g}, so they "
        "are of another precision (bf16, fp16), hidden size or number of ranks that share a layer"
    )
