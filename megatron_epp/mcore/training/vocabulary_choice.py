"""The choice of `--epp-vocab-parallel auto`, from data and costs, before there is a model."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from functools import partial

from megatron_epp.cost import PipelineCosts, Profile
from megatron_epp.cost.library import even_layers
from megatron_epp.mcore.arguments.consequences import placement_of
from megatron_epp.mcore.arguments.layout import asked_layout
from megatron_epp.mcore.arguments.vocabulary import FLAG, settle_vocabulary
from megatron_epp.mcore.costs.shape import for_run
from megatron_epp.mcore.costs.stored import named, of_first
from megatron_epp.mcore.training.layout import first_batches, sample_of
from megatron_epp.plan.layout import Layout
from megatron_epp.planner.layouts.search import fastest

logger = logging.getLogger(__name__)


def choose_vocabulary(args: argparse.Namespace) -> None:
    """Settle `--epp-vocab-parallel auto` on the job's first rank for all, by plans for the run's first batches.

    A collective call. The layers are from `--epp-layout`, or even. Equal flags and data give an equal choice, so a resumed run
    makes the same choice as the run before.

    Args:
        args: validated arguments, which get ``on`` or ``off``.
    """
    if args.epp_vocab_parallel == "auto":
        settle_vocabulary(args, shards=of_first(partial(_is_faster, args, named(args))))


def _is_faster(args: argparse.Namespace, costs: Profile | PipelineCosts | None) -> bool:
    """Return True if plans are clearly faster with the output layer divided over the ranks (`fastest` has the threshold)."""
    if isinstance(costs, PipelineCosts):
        return costs.vocabulary is not None  # they are of one of the two
    if args.skip_train:
        return False
    placement = placement_of(args)
    layout = asked_layout(args) or Layout.of_layers(even_layers(args.num_layers, placement.num_stages), placement)
    sample = sample_of(args, for_run(args, costs), layout, tuple(first_batches(args)))
    found = fastest([layout, replace(layout, shards_vocabulary=True)], sample)
    where = "divided over the pipeline ranks" if found.layout.shards_vocabulary else "on the last stage"
    logger.info("%s auto: the output layer is %s; it saves %.1f%% for batches like the first", FLAG, where, 100 * found.gain)
    return found.layout.shards_vocabulary
