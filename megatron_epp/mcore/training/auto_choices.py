"""The choice of `--epp-latents auto`, from data and costs, before there is a model.

A collective call: the job's first rank chooses for all. The layers are from `--epp-layout`, or even. Equal flags and data give
an equal choice, so a resumed run makes the same choice as the run before.
"""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from functools import partial

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.costs.megatron_facts import FORMULAS, costs_file, run_facts
from megatron_epp.mcore.costs.stored import named
from megatron_epp.mcore.early_planning import ask
from megatron_epp.mcore.training.layout_search import first_batches, given_layout, question
from megatron_epp.runtime.links.objects import made_by_first

logger = logging.getLogger(__name__)


def settle_latents(args: argparse.Namespace) -> None:
    """Settle `--epp-latents auto` by plans for the run's first batch and its longest sequence."""
    if args.epp_latents == "auto":
        args.epp_latents = "on" if made_by_first(partial(_are_better, args, named(args, ask))) else "off"


def _are_better(args: argparse.Namespace, costs: PipelineCosts | None) -> bool:
    if costs is not None:
        return any(stage.kv.expanded_heads for stage in costs.stages)  # they are of one of the two
    if args.skip_train or args.epp_schedule != "elastic":
        return False
    # Before the layout and the vocabulary are settled, whose searches need something that fits.
    layout = replace(given_layout(args), shards_vocabulary=args.epp_vocab_parallel != "off")
    asked = question(args, layout, (next(first_batches(args)), (args.seq_length,)))
    choice = ask(f"{FORMULAS}:choose_latents_of", run_facts(args, ask), costs_file(args), asked)
    logger.info("--epp-latents auto: %s, for a batch like the first and a sequence of %d tokens", choice, args.seq_length)
    return bool(choice.relays_latents)
