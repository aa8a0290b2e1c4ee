"""The choices of `--epp-latents auto` and `--epp-vocab-parallel auto`, from data and costs, before there is a model.

Both are collective calls: the job's first rank chooses for all. The layers are from `--epp-layout`, or even. Equal flags and
data give an equal choice, so a resumed run makes the same choice as the run before.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from functools import partial

from megatron_epp.cost import PipelineCosts, Profile
from megatron_epp.cost.library import even_layers
from megatron_epp.mcore.arguments.layout import asked_layout, placement_of
from megatron_epp.mcore.arguments.vocabulary import VOCABULARY_FLAG, settle_vocabulary
from megatron_epp.mcore.costs.shape import for_search, share_that_trains
from megatron_epp.mcore.costs.stored import named
from megatron_epp.mcore.training.layout_search import first_batches, sample_of
from megatron_epp.plan.layout import Layout
from megatron_epp.planner.latents_choice import LatentsTrial, choose_latents
from megatron_epp.planner.layouts.layout_choice import fastest
from megatron_epp.runtime.links.objects import made_by_first

logger = logging.getLogger(__name__)


def settle_latents(args: argparse.Namespace) -> None:
    """Settle `--epp-latents auto` by plans for the run's first batch and its longest sequence.

    Args:
        args: validated arguments of a model with latent attention, which get ``on`` or ``off``.
    """
    if args.epp_latents == "auto":
        args.epp_latents = "on" if made_by_first(partial(_are_better, args, named(args))) else "off"


def choose_vocabulary(args: argparse.Namespace) -> None:
    """Settle `--epp-vocab-parallel auto` by plans for the run's first batches.

    Args:
        args: validated arguments, which get ``on`` or ``off``.
    """
    if args.epp_vocab_parallel == "auto":
        settle_vocabulary(args, shards=made_by_first(partial(_is_faster, args, named(args))))


def _layout_of(args: argparse.Namespace) -> Layout:
    placement = placement_of(args)
    return asked_layout(args) or Layout.of_layers(even_layers(args.num_layers, placement.num_stages), placement)


def _are_better(args: argparse.Namespace, costs: Profile | PipelineCosts | None) -> bool:
    if isinstance(costs, PipelineCosts):
        return any(stage.kv.expanded_heads for stage in costs.stages)  # they are of one of the two
    if args.skip_train or args.epp_schedule != "elastic":
        return False
    # Before the layout and the vocabulary are settled, whose searches need something that fits.
    layout = replace(_layout_of(args), shards_vocabulary=args.epp_vocab_parallel != "off")
    batches = next(first_batches(args)), (args.seq_length,)

    def trial(choice: str) -> LatentsTrial:
        settings = argparse.Namespace(**vars(args) | {"epp_latents": choice})
        sample = sample_of(settings, for_search(settings, costs), layout, batches)
        return LatentsTrial(sample.problems, sample.costs_of(layout), sample.options)

    choice = choose_latents(trial)
    logger.info("--epp-latents auto: %s, for a batch like the first and a sequence of %d tokens", choice, args.seq_length)
    return choice.relays_latents


def _is_faster(args: argparse.Namespace, costs: Profile | PipelineCosts | None) -> bool:
    """Return True if plans are clearly faster with the output layer divided over the ranks (`fastest` has the threshold)."""
    if isinstance(costs, PipelineCosts):
        return costs.vocabulary is not None  # they are of one of the two
    if args.skip_train or share_that_trains(args) < 1:  # shards are for models of which everything trains
        return False
    layout = _layout_of(args)
    sample = sample_of(args, for_search(args, costs), layout, tuple(first_batches(args)))
    choice = fastest([layout, replace(layout, shards_vocabulary=True)], sample)
    where = "divided over the pipeline ranks" if choice.layout.shards_vocabulary else "on the last stage"
    logger.info(
        "%s auto: the output layer is %s; it saves %.1f%% for batches like the first", VOCABULARY_FLAG, where, 100 * choice.gain
    )
    return choice.layout.shards_vocabulary
