"""The choice of `--epp-latents auto`, from data and costs, before there is a model."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from functools import partial

from megatron_epp.cost import PipelineCosts, Profile
from megatron_epp.cost.library import even_layers
from megatron_epp.mcore.arguments.consequences import placement_of
from megatron_epp.mcore.arguments.layout import asked_layout
from megatron_epp.mcore.costs.shape import for_run
from megatron_epp.mcore.costs.stored import named, of_first
from megatron_epp.mcore.training.layout import first_batches, sample_of
from megatron_epp.plan.layout import Layout
from megatron_epp.planner.latents import LatentsTrial, choose_latents

logger = logging.getLogger(__name__)


def settle_latents(args: argparse.Namespace) -> None:
    """Settle `--epp-latents auto` on the job's first rank for all, by plans for the run's first batch and its longest sequence.

    A collective call. The layers are from `--epp-layout`, or even. Equal flags and data give an equal choice, so a resumed run
    makes the same choice as the run before.

    Args:
        args: validated arguments of a model with latent attention, which get ``on`` or ``off``.
    """
    if args.epp_latents == "auto":
        args.epp_latents = "on" if of_first(partial(_are_better, args, named(args))) else "off"


def _are_better(args: argparse.Namespace, costs: Profile | PipelineCosts | None) -> bool:
    if isinstance(costs, PipelineCosts):
        return any(stage.kv.expanded_heads for stage in costs.stages)  # they are of one of the two
    if args.skip_train or args.epp_schedule != "elastic":
        return False
    placement = placement_of(args)
    layout = asked_layout(args) or Layout.of_layers(even_layers(args.num_layers, placement.num_stages), placement)
    # Before the layout and the vocabulary are settled, whose searches need something that fits.
    layout = replace(layout, shards_vocabulary=args.epp_vocab_parallel != "off")
    batches = next(first_batches(args)), (args.seq_length,)

    def trial(choice: str) -> LatentsTrial:
        given = argparse.Namespace(**vars(args) | {"epp_latents": choice})
        sample = sample_of(given, for_run(given, costs), layout, batches)
        return LatentsTrial(sample.problems, sample.costs_of(layout), sample.options)

    found = choose_latents(trial)
    logger.info("--epp-latents auto: %s, for a batch like the first and a sequence of %d tokens", found, args.seq_length)
    return found.relays_latents
