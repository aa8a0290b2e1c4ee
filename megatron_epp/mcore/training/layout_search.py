"""The layout that `--epp-layout auto` and `balanced` find when a run is set up, from data and costs, before there is a model.

It is kept with the checkpoints, so that a resumed run has the layout of the run before.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.cost import PipelineCosts, Profile
from megatron_epp.cost.library import balanced_layers
from megatron_epp.data.iterator import samples_in, sequences_of
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from megatron_epp.mcore.arguments.layout import (
    LAYOUT_FLAG,
    SEARCHED,
    asked_layout,
    half_problems,
    settle_layout,
    token_multiple,
)
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.arguments.vocabulary import settle_vocabulary, shards_vocabulary
from megatron_epp.mcore.costs.shape import facts, for_search, optimizer_bytes, share_that_trains, with_device_memory
from megatron_epp.mcore.costs.stored import named, write_whole
from megatron_epp.mcore.data.documents import build_splits
from megatron_epp.mcore.data.encoders import identity_of_run
from megatron_epp.mcore.model.model_chunks import settle_stages
from megatron_epp.mcore.training.caps import offloads, wanted_cap_bytes
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout, layers_text
from megatron_epp.plan.reading import brief_text, read_text
from megatron_epp.planner.layouts.layout_choice import Sample, choose
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.service.replica_balance import by_count
from megatron_epp.runtime.links.objects import made_by_first

logger = logging.getLogger(__name__)

FILE_NAME = "epp_layout.json"
_BATCHES = 8
"""Number of the run's first batches that are the sample. Not measured: more make the search longer, in proportion."""


def search_layout(args: argparse.Namespace) -> None:
    """Find the layout if `--epp-layout` leaves it to the run, on the job's first rank for all. A collective call.

    Args:
        args: validated arguments, which get the layout.

    Raises:
        EppError: no layout fits the caps, there are no documents, or `--epp-costs` has costs of whole stages.
    """
    if args.epp_layout not in SEARCHED:
        return
    costs = named(args)
    flags = facts(args, "layout")
    layout = made_by_first(lambda: _kept(args, flags) or replace(_new(args, costs), chosen_with=flags))
    args.epp_chosen_layout = args.epp_layout
    if args.epp_layout == "auto":
        settle_vocabulary(args, shards=layout.shards_vocabulary)
    settle_layout(args, layout)
    settle_stages(args)
    if args.save and dist.get_rank() == 0:
        write_whole(Path(args.save, FILE_NAME), layout.to_json())


def _new(args: argparse.Namespace, costs: Profile | PipelineCosts | None) -> Layout:
    if isinstance(costs, PipelineCosts):
        raise EppError(
            f"{LAYOUT_FLAG} {args.epp_layout} needs costs of layers, and --epp-costs {args.epp_costs} has costs of stages"
        )
    even = asked_layout(args)
    assert even is not None
    if args.skip_train:
        return even
    profile = for_search(args, costs)
    batches = tuple(first_batches(args))
    if args.epp_layout == "balanced":
        lengths, rank_of = tuple(chain.from_iterable(batches)), even.placement.rank_of
        shards = shards_vocabulary(args)
        layers = balanced_layers(profile, args.num_layers, len(rank_of), lengths, rank_of, shards_vocabulary=shards)
        layout = Layout.of_layers(layers, even.placement, shards_vocabulary=shards)
        logger.info("%s balanced: stages of %s layers", LAYOUT_FLAG, layers_text(layout.halves))
        return layout
    choice = choose(sample_of(args, profile, even, batches))
    logger.info(
        "%s auto: stages of %s layers, %.1f%% less time than even layers for batches like the first %d",
        LAYOUT_FLAG,
        layers_text(choice.layout.halves),
        100 * choice.gain,
        len(batches),
    )
    return choice.layout


def sample_of(args: argparse.Namespace, profile: Profile, even: Layout, batches: tuple[tuple[int, ...], ...]) -> Sample:
    """Return what a search needs: batches of the run, its costs, and the layouts that are allowed."""
    caps = (wanted_cap_bytes(args),) * even.placement.num_ranks
    return Sample(
        problems=tuple(Problem(lengths, even.placement.rank_of, caps, token_multiple(args)) for lengths in batches),
        costs_of=partial(_costs, args, profile),
        num_layers=args.num_layers,
        options=options_from(args, training=True, offload=offloads(args)),
        halves=not any(half_problems(args, even, LAYOUT_FLAG)),
        placements=(even.placement,),
        vocabulary={"off": (False,), "on": (True,), "auto": (False, True)[: 1 + (share_that_trains(args) == 1)]}[
            args.epp_vocab_parallel
        ],
    )


def _costs(args: argparse.Namespace, profile: Profile, layout: Layout) -> PipelineCosts:
    costs = profile.costs(
        layout.layers,
        optimizer=replace(optimizer_bytes(args), trained_share=share_that_trains(args)),
        replicas=args.data_parallel_size,
        vocabulary_shares=layout.vocabulary_shares,
    )
    return with_device_memory(args, costs, profile.gradient_buffers(len(layout.halves)))


def first_batches(args: argparse.Namespace) -> Iterator[tuple[int, ...]]:
    """Yield the lengths in one replica's share of each of the run's first batches."""
    replicas = args.data_parallel_size
    tokens = max(args.epp_batch_tokens, replicas * args.seq_length) * _BATCHES if args.epp_batch_tokens else 0
    alone = argparse.Namespace(**vars(args) | {"eval_iters": 0})  # no files of validation and test are opened
    split = build_splits(alone, (_BATCHES * args.global_batch_size, 0, 0), identity_of_run(args), tokens)[0]
    assert split is not None  # training is wanted
    dataset, shuffle = split
    begin = 0, args.seed, shuffle
    sampler: GlobalBatchSampler = GlobalBatchSampler(len(samples_in(dataset)), args.global_batch_size, *begin)
    if args.epp_batch_tokens:
        sampler = TokenBatchSampler(samples_in(dataset), args.epp_batch_tokens, replicas, *begin)
    for _ in range(_BATCHES):
        batch = next(sampler)
        drawn = tuple(batch[at] for at in by_count(len(batch), 0, replicas))
        yield tuple(int(dataset.lengths[index]) for index in sequences_of(dataset, drawn)[0])


def _kept(args: argparse.Namespace, flags: dict[str, Any]) -> Layout | None:
    """Return the layout in the folder of the loaded checkpoint; None if there is none, or if it cannot run here."""
    path = Path(args.load, FILE_NAME) if args.load else None
    if path is None or not path.exists():
        return None
    even = asked_layout(args)
    assert even is not None
    try:
        layout = Layout.from_json(read_text(path))
        layout.check(args.num_layers, even.placement.num_ranks)
        if layout.placement != even.placement:
            raise EppError(f"it has {layout.placement.num_chunks} stages per rank, {layout.placement.kind}")
        if not layout.is_whole and (problem := next(half_problems(args, layout, LAYOUT_FLAG), None)):
            raise EppError(problem)
    except (EppError, OSError, UnicodeDecodeError) as error:
        logger.warning("%s: %s. The layout is searched again", path, error)
        return None
    others = [
        f"{name.replace('_', '-')} was {brief_text(then)} and is {value}"
        for name, value in flags.items()
        if str(then := layout.chosen_with.get(name)) != str(value)  # earlier versions wrote some as text
    ]
    if others:
        logger.warning("the layout of %s is kept, though it was chosen with other flags: --%s", path, ", --".join(others))
    logger.info("layout of the run before: stages of %s layers", layers_text(layout.halves))
    return layout
