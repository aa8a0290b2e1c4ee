"""Learnt costs kept with the checkpoints, so that a resumed run of the same model on the same machine does not learn again."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_epp.cost.blocks import LAYER, StageCosts
from megatron_epp.cost.kept import FILE_NAME, KeptCosts, from_state
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.costs.megatron_facts import facts
from megatron_epp.mcore.costs.sources import gathered
from megatron_epp.mcore.costs.stored import kept_file
from megatron_epp.mcore.releases import has_user_microbatches
from megatron_epp.plan import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.reading import parse_json, read_text
from megatron_epp.runtime.links.links import Links

logger = logging.getLogger(__name__)

_TIMES_OF_COPIES = ("message_latency_us", "message_us_per_byte", "host_latency_us", "host_us_per_byte", "copy_us_per_byte")
_TIMES_OF_SHARDS = ("logits", "gradient", "spread", "gather")
"""Fields with times; recompute modes have theirs besides."""


def fingerprint(args: argparse.Namespace, models: Mapping[int, torch.nn.Module], links: Links) -> dict[str, Any]:
    """Return what learnt costs depend on: model, parallel layout and machine. A collective call of a pipeline's ranks."""
    everyone = gathered({number: _digest(model) for number, model in models.items()}, links)
    digests = {number: digest for of_rank in everyone for number, digest in of_rank.items()}
    config = get_model_config(next(iter(models.values())))
    known: dict[str, Any] = {flag_of(name): value for name, value in facts(args, "costs", config).items()}
    device = f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    if torch.cuda.is_initialized():
        device = torch.cuda.get_device_name()
        if has_user_microbatches(args):
            known["static bytes"] = "neither of microbatches nor of passes"  # earlier versions have learnt others
    return known | {"the device": device, "parameters of stages": [digests[number] for number in sorted(digests)]}


def resumed(args: argparse.Namespace, loaded: Sequence[KeptCosts], now: Mapping[str, Any]) -> PipelineCosts | None:
    """Return costs that an earlier run learnt, by the folder of the loaded checkpoint; None if there are none for this run.

    The first rank of the job decides for all. A warning says why kept costs do not hold.
    """
    path = kept_file(args, FILE_NAME)
    source = path if not loaded else "the checkpoint"
    try:
        if not loaded and path is not None:
            loaded = from_state(parse_json(read_text(path), "the text"))
    except (EppError, OSError, UnicodeDecodeError) as error:
        logger.warning("%s: %s. Costs are learnt again", path, error)
        return None
    # Several pipelines' costs may be kept: a script can have more than one.
    obstacles = [(costs, costs.obstacle(now)) for costs in loaded]
    for costs, obstacle in obstacles:
        if not obstacle:
            logger.info("costs are those that an earlier run of this model has learnt")
            return costs.costs
    if obstacles:
        nearest = min((obstacle for _, obstacle in obstacles), key=len)
        logger.warning("costs are learnt again: the ones in %s are of another run, since %s", source, nearest)
    return None


def _digest(model: torch.nn.Module) -> str:
    """Digest of the shapes and types of a model chunk's parameters, in their order, and of which of them are frozen."""
    text = ";".join(f"{list(w.shape)} {w.dtype}{'' if w.requires_grad else ' frozen'}" for w in model.parameters())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_times(here: PipelineCosts, earlier: PipelineCosts) -> PipelineCosts:
    """Combine the bytes of `here` with the times of `earlier`."""
    stages = tuple(map(_stage_with_times, here.stages, earlier.stages))
    vocabulary = here.vocabulary
    if vocabulary is not None and earlier.vocabulary is not None:
        vocabulary = replace(vocabulary, **{name: getattr(earlier.vocabulary, name) for name in _TIMES_OF_SHARDS})
    times = {name: getattr(earlier, name) for name in _TIMES_OF_COPIES}
    return replace(here, name=earlier.name, stages=stages, vocabulary=vocabulary, **times)


def _stage_with_times(now: StageCosts, then: StageCosts) -> StageCosts:
    timed = then.layers.recompute
    modes = {name: replace(mode, again=timed[name].again) for name, mode in now.layers.recompute.items() if name in timed}
    for name in ("forward", "backward", "weight"):
        now = now.with_lines(name, *then.lines(name))
    return replace(now.changed(LAYER, recompute=modes), unlike=now.unlike)
