"""Costs stored in files: the file that `--epp-costs` names, and costs learnt earlier, which are kept with the checkpoints.

The first rank of the job reads and decides for all, since a folder may exist on its machine only, or appear late on others.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path

from megatron_epp.cost import PipelineCosts, StageCosts
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.library import find, load_costs
from megatron_epp.cost.profile import Profile
from megatron_epp.mcore.arguments.vocabulary import FLAG, vocabulary_shares
from megatron_epp.plan import EppError
from megatron_epp.plan.writing import write_text
from megatron_epp.runtime.links.objects import made_by_first

_TIMES_OF_LINKS = ("message_latency_us", "message_us_per_byte", "host_latency_us", "host_us_per_byte")
_TIMES_OF_SHARDS = ("logits", "gradient", "spread", "gather")
"""Fields with times; recompute modes have theirs besides."""


def named(args: argparse.Namespace) -> Profile | PipelineCosts | None:
    """Read the file or shipped profile that `--epp-costs` names; None if it names none. A collective call of all ranks.

    Raises `EppError` if the file does not exist, or contains neither a profile nor costs of a pipeline.
    """
    if args.epp_costs in ("analytic", "learn"):
        return None
    return made_by_first(lambda: _read(args.epp_costs))


def _read(name: str) -> Profile | PipelineCosts:
    try:
        path = find("profiles", name)
    except EppError as error:
        raise EppError(f"--epp-costs {name}: {error}. Or give analytic or learn") from error
    return load_costs(str(path))


def checked(costs: PipelineCosts, source: str, num_stages: int, token_bytes: float) -> PipelineCosts:
    """Return costs of a whole pipeline read from a file. Raises `EppError` if they are of another pipeline or precision."""
    if len(costs.stages) != num_stages:
        raise EppError(
            f"{source} has costs of {len(costs.stages)} stages but the pipeline has {num_stages}: give another file, or "
            "learn them (--epp-costs learn)"
        )
    if not math.isclose(costs.hidden_bytes_per_token, token_bytes):
        raise EppError(f"{source} has {other_bytes(costs, token_bytes)}: give another file, or learn them (--epp-costs learn)")
    return costs


def check_latents(args: argparse.Namespace, costs: PipelineCosts) -> None:
    """Raise `EppError` if slices hand on latents by the costs of a pipeline and not in this run, or the other way round."""
    theirs = any(stage.kv.expanded_heads for stage in costs.stages)
    if theirs != (args.epp_latents == "on"):
        what, own = ("latents", "keys and values") if theirs else ("keys and values", "latents")
        raise EppError(
            f"{args.epp_costs} has costs of slices that hand on {what}, and this run's hand on {own}: give another file, or "
            f"--epp-latents {'on' if theirs else 'off'}"
        )


def check_shares(args: argparse.Namespace, costs: PipelineCosts) -> None:
    """Raise `EppError` for costs from a file that have the output layer on other ranks than this run."""
    of_run, shares = vocabulary_shares(args), () if costs.vocabulary is None else costs.vocabulary.shares
    if len(of_run) != len(shares) or not all(map(math.isclose, of_run, shares)):
        what = "has the output layer on the last stage" if not shares else f"divides the vocabulary by {list(shares)}"
        raise EppError(
            f"{args.epp_costs} {what} and this run, with {FLAG} {args.epp_vocab_parallel}, does not: give another file, or "
            "learn them (--epp-costs learn)"
        )


def write_whole(path: Path, text: str) -> None:
    """Write a file of a checkpoint folder, which is made if needed, whole or not at all. Raises `EppError`, which names it."""
    try:
        os.makedirs(path.parent, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise EppError(f"cannot write {error.filename or path}: {error.strerror}") from None


def with_times(here: PipelineCosts, earlier: PipelineCosts) -> PipelineCosts:
    """Combine the bytes of `here` with the times of `kept`."""
    stages = tuple(map(_stage_with_times, here.stages, earlier.stages))
    vocabulary = here.vocabulary
    if vocabulary is not None and earlier.vocabulary is not None:
        vocabulary = replace(vocabulary, **{name: getattr(earlier.vocabulary, name) for name in _TIMES_OF_SHARDS})
    times = {name: getattr(earlier, name) for name in _TIMES_OF_LINKS}
    return replace(here, name=earlier.name, stages=stages, vocabulary=vocabulary, **times)


def _stage_with_times(now: StageCosts, then: StageCosts) -> StageCosts:
    timed = then.layers.recompute
    modes = {name: replace(mode, again=timed[name].again) for name, mode in now.layers.recompute.items() if name in timed}
    for name in ("forward", "backward", "weight"):
        now = now.with_lines(name, *then.lines(name))
    return now.changed(LAYER, recompute=modes)


def other_bytes(costs: PipelineCosts, token_bytes: float) -> str:
    """Describe costs whose messages differ in size from this run's, as a part of a sentence."""
    return (
        f"costs of messages of {costs.hidden_bytes_per_token:g} bytes per token where this run's take {token_bytes:g}, so they "
        "are of another precision (--bf16, --fp16), --hidden-size or number of ranks that share a layer"
    )
