"""Choice of what flags leave open of a layout, from data and costs when a run is set up, before there is a model.

Layers of the stages, stages on a rank and their placement, whether the output layer is divided, and whether weight gradients
are actions of their own. The choices are kept with the checkpoints: a resumed run has those of the run before.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.output_layer import AUTO
from megatron_epp.data.iterator import samples_in, sequences_of
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from megatron_epp.formulas import Profile
from megatron_epp.formulas.library import balanced_layers
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.layout import (
    LAYOUT_FLAG,
    SEARCHED,
    asked_layout,
    half_problems,
    placement_of,
    settle_layout,
    token_multiple,
)
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.arguments.refusals import delays_weights, refuse
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.start import TRACKER, common_state, validate
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.arguments.vocabulary import settle_vocabulary, shards_vocabulary
from megatron_epp.mcore.costs.shape import facts, for_search, optimizer_bytes, share_that_trains, with_device_memory
from megatron_epp.mcore.costs.stored import named, write_whole
from megatron_epp.mcore.data.documents import build_splits
from megatron_epp.mcore.data.encoders import identity_of_run
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.mcore.model.model_chunks import settle_stages
from megatron_epp.mcore.training.caps import offloads, wanted_cap_bytes
from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout, even_layers, layers_text
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Problem, by_count
from megatron_epp.plan.reading import brief_text, read_text
from megatron_epp.planner.defaults import WholeLogits, settle
from megatron_epp.planner.layouts.layout_choice import Sample
from megatron_epp.runtime.links.objects import made_by_first

logger = logging.getLogger(__name__)

FILE_NAME = "epp_layout.json"
_BATCHES = 8
"""Number of the run's first batches that are the sample. Not measured: more make the search longer, in proportion."""


@dataclass(frozen=True, slots=True)
class _Choices:
    """Choices of the job's first rank.

    Attributes:
        layout: of the layers, and whether the output layer is divided.
        splits_weights: weight gradients are actions of their own, where plans are faster with them.
        has_whole_logits: the logits of a whole chunk are there at once, where `--epp-loss-block-tokens` leaves it open.
    """

    layout: Layout
    splits_weights: bool = False
    has_whole_logits: bool = False


def settle_choices(args: argparse.Namespace, flags: argparse.Namespace) -> None:
    """Choose what flags leave open of layers, output layer and weight gradients, on the job's first rank for all.

    A collective call, before there are groups of ranks.

    Args:
        args: validated arguments, which get the choices.
        flags: those that Megatron had not validated yet.

    Raises:
        EppError: by a layout that is asked for: none fits the caps, there are no documents, or `--epp-costs` has costs of
            whole stages.
    """
    searches, opens_weights = args.epp_layout in SEARCHED, args.epp_split_weight_gradient == AUTO
    if not (searches or opens_weights or args.epp_vocab_parallel == AUTO):
        return
    costs = named(args)
    choices = made_by_first(lambda: _kept(args, flags, facts(args, "layout")) or _new(args, flags, costs))
    if opens_weights:
        args.epp_split_weight_gradient = choices.splits_weights
        args.delay_wgrad_compute = delays_weights(args)
    if choices.has_whole_logits:
        args.epp_loss_block_tokens = 0
    chosen_with = facts(args, "layout")
    if args.epp_layout != "balanced":
        settle_vocabulary(args, shards=choices.layout.shards_vocabulary)
    if searches:
        args.epp_chosen_layout = args.epp_layout
        _take(args, flags, choices.layout)
        settle_stages(args)
    if args.save and dist.get_rank() == 0:
        write_whole(Path(args.save, FILE_NAME), replace(choices.layout, chosen_with=chosen_with).to_json())


def _take(args: argparse.Namespace, flags: argparse.Namespace, layout: Layout) -> None:
    """Take a layout for the run, and what Megatron's validation says of one with as many stages."""
    settle_layout(args, layout)
    validated = _validated(flags, layout)
    for name in _OF_STAGES:
        if hasattr(args, name):
            setattr(args, name, getattr(validated, name))


_OF_STAGES = ("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "align_param_gather")
"""Arguments that Megatron's validation derives from the number of stages on a rank."""


def _validated(flags: argparse.Namespace, layout: Layout) -> argparse.Namespace:
    """Return a run's flags with a layout, as Megatron validates them.

    Raises:
        ArgumentError: flags do not go with the layout.
    """
    own = {"epp_layout": layers_text(layout.halves).replace(" ", ""), "epp_placement": layout.placement.kind}
    megatrons = {"pipeline_model_parallel_layout": None, "num_virtual_stages_per_pipeline_rank": None}
    trial = argparse.Namespace(**vars(flags) | own | megatrons)
    refuse(trial, Door.DOCUMENTS)
    settle_layout(trial, layout)
    return validate(trial)


def _obstacle(flags: argparse.Namespace, layout: Layout) -> str:
    try:
        _validated(flags, layout)
    except ArgumentError as error:
        return str(error)
    return ""


def _new(args: argparse.Namespace, flags: argparse.Namespace, costs: Profile | PipelineCosts | None) -> _Choices:
    first, is_asked = given_layout(args), args.epp_layout in SEARCHED and not args.epp_chosen_by_default
    if isinstance(costs, PipelineCosts):  # they are of one layout
        if is_asked:
            raise EppError(
                f"{LAYOUT_FLAG} {args.epp_layout} needs costs of layers, and --epp-costs {args.epp_costs} has costs of stages"
            )
        logger.info("layers are as Megatron divides them, since --epp-costs %s has costs of stages", args.epp_costs)
        return _Choices(replace(first, shards_vocabulary=costs.vocabulary is not None), costs.splits_weight)
    if not is_asked and (folder := _fixed_state(args)):
        logger.info("stages are those of %s, since no others can load its optimizer state", folder)
        return _Choices(first)
    if args.skip_train:
        return _Choices(first)
    profile, batches = for_search(args, costs), tuple(first_batches(args))
    sample, layouts = sample_of(args, profile, first, batches), list[Layout]()
    try:
        if args.epp_layout == "auto":
            others = (other for other in _open_placements(args) if other != first.placement)
            placements = first.placement, *(other for other in others if not _obstacle(flags, _even(args, other)))
            sample = replace(sample, placements=placements)
        else:
            lengths, ranks = tuple(chain.from_iterable(batches)), first.placement.rank_of
            if args.epp_layout == "balanced":
                shards = shards_vocabulary(args)
                layers = balanced_layers(profile, args.num_layers, len(ranks), lengths, ranks, shards_vocabulary=shards)
                first = Layout.of_layers(layers, first.placement)
            layouts = [replace(first, shards_vocabulary=shards) for shards in sample.vocabulary]
        is_open = args.epp_split_weight_gradient == AUTO
        settled = settle(
            sample,
            tensor_ranks=args.tensor_model_parallel_size,
            opens_weights=is_open,
            layouts=layouts,
            logits=_whole_logits(args, costs),
        )
    except InfeasibleError as error:
        if is_asked:
            raise
        logger.info("layers are as Megatron divides them, since no layout fits: %s", error.text(TRAINING))
        return _Choices(first)
    plain = "Megatron's layers" if args.epp_layout == "auto" else "without the choice"
    logger.info(
        "layout: %s%s%s: %s for batches like the first %d",
        settled.layout.text(),
        ", weight gradients split off" * settled.splits_weight,
        ", all logits of a chunk at once" * settled.has_whole_logits,
        f"{settled.gain:.1%} less time than {plain}" if settled.gain > 0 else "no other is clearly faster",
        len(batches),
    )
    return _Choices(settled.layout, settled.splits_weight, settled.has_whole_logits)


def _whole_logits(args: argparse.Namespace, costs: Profile | None) -> WholeLogits | None:
    """Return the costs of the run without blocks of its loss; None if flags or its costs say which it has, or it has none."""
    is_open = args.epp_layout == "auto" and args.epp_loss_block_tokens == AUTO and costs is None and args.epp_loss is None
    if not is_open or args.epp_schedule != "elastic" or not block_tokens_of(args):
        return None
    whole = argparse.Namespace(**vars(args) | {"epp_loss_block_tokens": 0})
    return WholeLogits(partial(_costs, whole, for_search(whole)), args.seq_length)


def given_layout(args: argparse.Namespace) -> Layout:
    """Return the layout that flags give, or even layers."""
    return asked_layout(args) or _even(args, placement_of(args))


def _even(args: argparse.Namespace, placement: Placement) -> Layout:
    return Layout.of_layers(even_layers(args.num_layers, placement.num_stages), placement)


def _open_placements(args: argparse.Namespace) -> Iterator[Placement]:
    for kind, chunks in args.epp_open_placements:
        if args.num_layers >= chunks * args.pipeline_model_parallel_size:
            yield Placement(kind, args.pipeline_model_parallel_size, chunks)


def _fixed_state(args: argparse.Namespace) -> Path | None:
    """Return the folder of the loaded checkpoint if its optimizer state is one of its own stages alone."""
    folder = Path(args.load) if args.load else None
    if folder is None or not (folder / TRACKER).is_file() or args.finetune or args.no_load_optim or args.skip_train:
        return None
    then = (common_state(folder) or {}).get("args")
    if then is not None and (not then.use_distributed_optimizer or getattr(then, "dist_ckpt_optim_fully_reshardable", False)):
        return None
    return folder


def sample_of(args: argparse.Namespace, profile: Profile, even: Layout, batches: tuple[tuple[int, ...], ...]) -> Sample:
    """Return what a search needs: batches of the run, its costs, and the layouts that are allowed, placed as `even` is."""
    caps = (wanted_cap_bytes(args),) * even.placement.num_ranks
    splits = args.epp_split_weight_gradient is True
    return Sample(
        problems=tuple(Problem(lengths, even.placement.rank_of, caps, token_multiple(args)) for lengths in batches),
        costs_of=partial(_costs, args, profile),
        num_layers=args.num_layers,
        options=options_from(args, training=True, offload=offloads(args), split_weight=splits),
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Return a context in which reading data logs nothing: the training reads it once more, and logs the same."""
    loggers = [logging.getLogger(name) for name in ("megatron_epp.mcore.data", "megatron.core.datasets")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def first_batches(args: argparse.Namespace) -> Iterator[tuple[int, ...]]:
    """Yield the lengths in one replica's share of each of the run's first batches."""
    replicas = args.data_parallel_size
    if args.epp_documents == "stream":  # Megatron's samples, which all ranks build together
        yield from ((args.seq_length,) * (args.global_batch_size // replicas),) * _BATCHES
        return
    tokens = max(args.epp_batch_tokens, replicas * args.seq_length) * _BATCHES if args.epp_batch_tokens else 0
    alone = argparse.Namespace(**vars(args) | {"eval_iters": 0})  # no files of validation and test are opened
    with _quiet():
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


def _kept(args: argparse.Namespace, flags: argparse.Namespace, chosen_with: dict[str, Any]) -> _Choices | None:
    """Return the choices in the folder of the loaded checkpoint; None if there are none, or if they cannot run here."""
    path = Path(args.load, FILE_NAME) if args.load else None
    if path is None or not path.exists():
        return None
    first, searches = given_layout(args), args.epp_layout in SEARCHED
    try:
        layout = Layout.from_json(read_text(path))
        layout.check(args.num_layers, first.placement.num_ranks)
        if not searches and layout.halves != first.halves:
            raise EppError(f"it has stages of {layers_text(layout.halves)} layers")
        if layout.placement not in (first.placement, *_open_placements(args)):
            raise EppError(f"it has {layout.placement.num_chunks} stages per rank, {layout.placement.kind}")
        if searches and layout != first and (problem := _obstacle(flags, layout)):
            raise EppError(problem)
    except (EppError, OSError, UnicodeDecodeError) as error:
        logger.warning("%s: %s. The layout is searched again", path, error)
        return None
    then = layout.chosen_with
    others = [
        f"{name.replace('_', '-')} was {brief_text(then.get(name))} and is {value}"
        for name, value in chosen_with.items()
        if str(then.get(name)) != str(value) and value != AUTO  # earlier versions wrote some as text
    ]
    if others:
        logger.warning("the layout of %s is kept, though it was chosen with other flags: --%s", path, ", --".join(others))
    logger.info("layout of the run before: %s", layout.text())
    logits = args.epp_loss_block_tokens == AUTO and then.get("epp_loss_block_tokens") == 0
    return _Choices(layout, then.get("epp_split_weight_gradient") is True, logits)
