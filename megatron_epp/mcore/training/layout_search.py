"""Choice of what flags leave open of a layout, from data and costs when a run is set up, before there is a model.

Layers of the stages, stages on a rank and their placement, whether the output layer is divided, and whether weight gradients
are actions of their own. These are kept with the checkpoints: a resumed run has those of the run before. What slices of latent
attention hand on is chosen before, and again: equal flags and data give an equal choice.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.data.iterator import samples_in, sequences_of
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.layout import LAYOUT_FLAG, SEARCHED, apply_layout, asked_layout, placement_of, token_multiple
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.arguments.refusals import delays_weights, refuse
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.start import TRACKER, common_state, validate
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.costs.megatron_facts import FORMULAS, costs_file, facts, run_facts
from megatron_epp.mcore.costs.stored import keep_file, kept_file, named
from megatron_epp.mcore.data.documents import build_splits, identity_of_run
from megatron_epp.mcore.early_planning import ask
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.mcore.model.model_chunks import settle_stages
from megatron_epp.mcore.training.caps import offloads, wanted_cap_bytes
from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.layout import Layout, even_layers, layers_text
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import by_count
from megatron_epp.plan.reading import brief_text, read_text
from megatron_epp.port.run_facts import LayoutAnswer, LayoutQuestion
from megatron_epp.runtime.links.objects import made_by_first

logger = logging.getLogger(__name__)

FILE_NAME = "epp_layout.json"
_BATCHES = 8
"""Number of the run's first batches that are the sample. Not measured: more make the search longer, in proportion."""


def settle_latents(args: argparse.Namespace) -> None:
    """Settle `--epp-latents auto` by plans for the run's first batch and its longest sequence. A collective call."""
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


def settle_choices(args: argparse.Namespace, flags: argparse.Namespace) -> None:
    """Choose what flags leave open of layers, output layer and weight gradients, on the job's first rank for all.

    A collective call, before there are groups of ranks. Validated `args` get the choices. Raises `EppError` by a layout that is
    asked for: none fits the caps, there are no documents, or `--epp-costs` has costs of whole stages.
    """
    searches, opens_weights = args.epp_layout in SEARCHED, args.epp_split_weight_gradient == AUTO
    if not (searches or opens_weights or args.epp_vocab_parallel == AUTO):
        return
    costs = named(args, ask)
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
        _settle_layout(args, choices.layout)
        validated = _validated(flags, choices.layout)
        for name in filter(partial(hasattr, args), _OF_STAGES):
            setattr(args, name, getattr(validated, name))
        settle_stages(args)
    keep_file(args, FILE_NAME, replace(choices.layout, chosen_with=chosen_with).to_json())


def settle_vocabulary(args: argparse.Namespace, *, shards: bool) -> None:
    """Replace ``auto`` by a decision: divide the output layer if `shards`. Any other setting stays as it is."""
    if args.epp_vocab_parallel == AUTO:
        args.epp_vocab_parallel = "on" if shards else "off"


def _settle_layout(args: argparse.Namespace, layout: Layout) -> None:
    """Replace ``auto`` or ``balanced`` by the layout that was found."""
    args.epp_layout, args.epp_placement = layers_text(layout.layers, ","), layout.placement.kind
    apply_layout(args)


_OF_STAGES = ("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "align_param_gather")
"""Arguments that Megatron's validation derives from the number of stages on a rank."""


def _validated(flags: argparse.Namespace, layout: Layout) -> argparse.Namespace:
    """Return a run's flags with a layout, as Megatron validates them. Raises `ArgumentError` if they do not go together."""
    own = {"epp_layout": layers_text(layout.layers, ","), "epp_placement": layout.placement.kind}
    megatrons = {"pipeline_model_parallel_layout": None, "num_virtual_stages_per_pipeline_rank": None}
    trial = argparse.Namespace(**vars(flags) | own | megatrons)
    refuse(trial, Door.DOCUMENTS)
    _settle_layout(trial, layout)
    return validate(trial)


def _obstacle(flags: argparse.Namespace, layout: Layout) -> str:
    try:
        _validated(flags, layout)
    except ArgumentError as error:
        return str(error)
    return ""


def _new(args: argparse.Namespace, flags: argparse.Namespace, costs: PipelineCosts | None) -> LayoutAnswer:
    first, is_asked = given_layout(args), args.epp_layout in SEARCHED and not args.epp_chosen_by_default
    if costs is not None:  # they are of one layout
        if is_asked:
            raise EppError(
                f"{LAYOUT_FLAG} {args.epp_layout} needs costs of layers, and --epp-costs {args.epp_costs} has costs of stages"
            )
        logger.info("layers are as Megatron divides them, since --epp-costs %s has costs of stages", args.epp_costs)
        return LayoutAnswer(replace(first, shards_vocabulary=costs.vocabulary is not None), costs.splits_weight)
    if not is_asked and (folder := _fixed_state(args)):
        logger.info("stages are those of %s, since no others can load its optimizer state", folder)
        return LayoutAnswer(first)
    if args.skip_train:
        return LayoutAnswer(first)
    placements: tuple[Placement, ...] = (first.placement,)
    search = args.epp_layout if args.epp_layout in SEARCHED else ""
    if search == "auto":
        others = (other for other in _open_placements(args) if other != first.placement)
        placements = first.placement, *(other for other in others if not _obstacle(flags, _even(args, other)))
    batches = tuple(first_batches(args))
    asked = replace(question(args, first, batches), placements=placements, search=search, longest=_longest_with_logits(args))
    try:
        answer: LayoutAnswer = ask(f"{FORMULAS}:choose_layout", run_facts(args, ask), costs_file(args), asked)
    except InfeasibleError as error:
        if is_asked:
            raise
        logger.info("layers are as Megatron divides them, since no layout fits: %s", error.text(TRAINING))
        return LayoutAnswer(first)
    plain = "Megatron's layers" if args.epp_layout == "auto" else "without the choice"
    logger.info(
        "layout: %s%s%s: %s for batches like the first %d",
        answer.layout.text(),
        ", weight gradients split off" * answer.splits_weights,
        ", all logits of a chunk at once" * answer.has_whole_logits,
        f"{answer.gain:.1%} less time than {plain}" if answer.gain > 0 else "no other is clearly faster",
        len(batches),
    )
    return answer


def _longest_with_logits(args: argparse.Namespace) -> int:
    """Return the tokens of the longest sequence where a loss by blocks is open; 0 if flags or costs say which it has."""
    is_open = args.epp_layout == "auto" and args.epp_loss_block_tokens == AUTO and args.epp_loss is None
    is_open = is_open and costs_file(args) is None and args.epp_schedule == "elastic"
    return args.seq_length if is_open and block_tokens_of(args) else 0


def given_layout(args: argparse.Namespace) -> Layout:
    """Return the layout that flags give, or even layers."""
    return asked_layout(args) or _even(args, placement_of(args))


def _even(args: argparse.Namespace, placement: Placement) -> Layout:
    return Layout(even_layers(args.num_layers, placement.num_stages), placement)


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


def question(args: argparse.Namespace, first: Layout, batches: tuple[tuple[int, ...], ...]) -> LayoutQuestion:
    """Return what formulas are asked for: batches of the run, and what flags leave open of layouts placed as `first` is."""
    splits = args.epp_split_weight_gradient is True
    return LayoutQuestion(
        batches=batches,
        first=first,
        placements=(first.placement,),
        search="",
        cap_bytes=wanted_cap_bytes(args),
        token_multiple=token_multiple(args),
        options=options_from(args, training=True, offload=offloads(args), split_weight=splits),
        vocabulary=args.epp_vocab_parallel,
        opens_weights=args.epp_split_weight_gradient == AUTO,
    )


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


def _kept(args: argparse.Namespace, flags: argparse.Namespace, chosen_with: dict[str, Any]) -> LayoutAnswer | None:
    """Return the choices in the folder of the loaded checkpoint; None if there are none, or if they cannot run here."""
    if (path := kept_file(args, FILE_NAME)) is None:
        return None
    first, searches = given_layout(args), args.epp_layout in SEARCHED
    try:
        layout = Layout.from_json(read_text(path))
        layout.check(args.num_layers, first.placement.num_ranks)
        if not searches and layout.layers != first.layers:
            raise EppError(f"it has stages of {layers_text(layout.layers)} layers")
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
    return LayoutAnswer(layout, then.get("epp_split_weight_gradient") is True, logits)
