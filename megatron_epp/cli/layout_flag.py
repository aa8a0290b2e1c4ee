"""``--layout``: the layers of every stage and their ranks, given, even, balanced, or searched for the batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from megatron_epp.cli.planning_flags import costs_by, costs_of, costs_source, flags_of, has_costs_of_stages, problem_of
from megatron_epp.cli.terminal import PROGRAM, progress, tell
from megatron_epp.cost import PipelineCosts
from megatron_epp.formulas import Profile
from megatron_epp.formulas.library import balanced_layers
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.layer_flags import pattern_of, whole_pattern
from megatron_epp.plan.layout import Layout, even_layers, layers_text, parse_layers, staged_pattern
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.reading import brief, naming_file, nearest, read_text
from megatron_epp.planner.defaults import WholeLogits, settle
from megatron_epp.planner.latents_choice import LatentsTrial, choose_latents
from megatron_epp.planner.layouts.layout_choice import LayoutChoice, Sample
from megatron_epp.report.text import format_us

AUTO, BALANCED, EVEN = "auto", "balanced", "even"
KINDS = ("looped", "v")
"""Placements of several stages per rank that a list of layers may begin with, as in ``v:8,8,8,8``."""
_STAGES = 4
"""Pipeline ranks where neither ``--stages`` nor a layout says how many."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The layout of a command, the search that found it (None if there was none), the model's depths of multi-token prediction,
    its layers if it is a hybrid one, the kind of the layout (even, balanced) if it is of one, and whether weight gradients are
    split off and the logits of a chunk are there at once with it.
    """

    layout: Layout
    choice: LayoutChoice | None = None
    predictions: int = 0
    pattern: str = ""
    kind: str = ""
    splits_weight: bool = False
    has_whole_logits: bool = False

    def lines(self) -> list[str]:
        """Describe the layout, in lines: none for even layers on one stage per rank that were asked for."""
        layout, placement = self.layout, self.layout.placement
        is_even = placement.num_chunks == 1 and layout == even(layout.num_layers, placement.num_ranks)
        if is_even and self.choice is None and self.kind != BALANCED:
            return []
        lines = [f"layout: {f'{self.kind}, ' * bool(self.kind)}{layout.text()}"]
        if is_even and self.choice is None:
            return lines
        if self.choice is not None:
            choice = self.choice
            lines[0] += f"; {format_us(choice.makespan_us)} expected, at least {format_us(choice.bound_us)} in any order"
            lines[0] += f", {format_us(choice.even_us)} with even layers ({choice.gain:.1%} saved)"
        if self.pattern:
            stages = staged_pattern(self.pattern, [count // 2 for count in layout.halves])
            flags = f"--hybrid-layer-pattern '{stages}'" + " --epp-placement v" * (not placement.is_looped)
        elif (megatron := layout.to_megatron(self.predictions)) is not None:
            flags = f"--pipeline-model-parallel-layout '{megatron}'"
        else:
            words = layers_text(layout.halves).replace(" ", "")
            flags = f"--epp-layout {words}" + " --epp-placement v" * (not placement.is_looped)
        flags += " --epp-vocab-parallel on" * layout.shards_vocabulary + " --epp-split-weight-gradient" * self.splits_weight
        flags += " --epp-loss-block-tokens 0" * self.has_whole_logits
        lines.append(f"in training: {flags}")
        return lines


def even(num_layers: int, num_ranks: int) -> Layout:
    """Return one stage per rank and even layers. Raises `EppError` if there are more ranks than layers."""
    return Layout.of_layers(even_layers(num_layers, num_ranks), Placement("looped", num_ranks, 1))


def pipeline_ranks(args: argparse.Namespace) -> int:
    """Return the number of pipeline ranks that the flags ask for."""
    return args.stages or _STAGES


def settle_latents(args: argparse.Namespace, batches: Sequence[tuple[int, ...]], planners: Sequence[str] | None = None) -> None:
    """Settle ``--latents auto`` in parsed flags by plans for batches.

    Args:
        batches, planners: as in `chosen_layout`.

    Raises:
        EppError: ``--latents on`` is given for a model without latent attention, or for costs of a pipeline.
    """
    has_latents, is_fixed = bool(flags_of(args).get("multi_latent_attention")), has_costs_of_stages(args)
    if args.latents == "on" and not has_latents:
        raise EppError("--latents on is for a model with latent attention: give one with --model, or leave it out")
    if args.latents == "on" and is_fixed:
        raise EppError(f"--costs {args.costs} has costs of a pipeline, which know what slices hand on: leave --latents out")
    if args.latents not in ("on", "off") and (not has_latents or is_fixed):
        args.latents = "off"
    if args.latents in ("on", "off"):
        return

    def trial(choice: str) -> LatentsTrial:
        settings = argparse.Namespace(**vars(args) | without_search(args) | {"latents": choice})
        layout = chosen_layout(settings, batches, planners).layout
        problems = [problem_of(settings, lengths, layout.placement) for lengths in batches]
        costs = costs_of(settings, [*chain.from_iterable(batches)], layout)
        return LatentsTrial(problems, costs, options_from(args, planner="greedy"))

    with progress("planning with latents, and with keys and values"):
        choice = choose_latents(trial)
    args.latents = "on" if choice.relays_latents else "off"
    tell(f"{PROGRAM}: --latents {args.latents}: {choice}")


def without_search(args: argparse.Namespace) -> dict[str, object]:
    """Return values of flags with which no layout is searched that is not asked for, where many are tried."""
    vocabulary = "on" if args.vocab_parallel == "on" else "off"
    return {"layout": args.layout or BALANCED, "vocab_parallel": vocabulary, "split_weight": args.split_weight in (True, "on")}


def chosen_layout(
    args: argparse.Namespace, batches: Sequence[tuple[int, ...]], planners: Sequence[str] | None = None
) -> Chosen:
    """Return the layout that ``--layout`` and ``--stages`` give.

    Args:
        batches: typical lengths, for which layers are balanced or the layout is searched.
        planners: that will plan; None for the flags' planner.

    Raises:
        EppError: the layout is not of this model or of these ranks, or a file cannot be read.
    """
    longest, has_whole_logits = max(chain.from_iterable(batches), default=0), False
    source, num_layers = costs_source(args, longest)
    text, ranks, flags = args.layout, pipeline_ranks(args), flags_of(args)
    of_model = Chosen(even(num_layers, 1), predictions=flags.get("mtp_num_layers") or 0, pattern=whole_pattern(flags))
    if isinstance(source, PipelineCosts):
        args.split_weight = args.split_weight in (True, "on")
        return replace(of_model, layout=_of_stages(args, source, ranks))
    with nullcontext() if args.costs is None else naming_file(f"--costs {args.costs}"):
        sample = _sample(args, source, num_layers, batches, planners or [args.planner])
        lengths = tuple(chain.from_iterable(batches))
        layouts = [_of_text(args, source, num_layers, lengths, shards=shards) for shards in sample.vocabulary]
        kind = BALANCED if text is None else text if text in (EVEN, BALANCED) else ""
        is_greedy = all(map(begins_with_greedy, planners or [args.planner]))
        searches = text == AUTO or (text is None and is_greedy)
        opens_weights = args.split_weight == AUTO and (searches or is_greedy)
        try:
            with progress("choosing about weight gradients" if not searches and len(layouts) == 1 else "choosing the layout"):
                if not searches and not opens_weights and len(layouts) == 1:
                    choice, layout, splits = None, layouts[0], False
                else:
                    settled = settle(
                        sample,
                        tensor_ranks=flags.get("tensor_model_parallel_size") or 1,
                        opens_weights=opens_weights,
                        layouts=() if searches else layouts,
                        logits=_whole_logits(args, source, longest) if searches else None,
                    )
                    has_whole_logits = settled.has_whole_logits
                    layout, splits = settled.layout, settled.splits_weight
                    choice = settled.choice if searches or len(layouts) > 1 else None
                if args.split_weight == AUTO:
                    args.split_weight = splits
                args.loss_block_tokens = 0 if has_whole_logits else args.loss_block_tokens
        except InfeasibleError:
            if text == AUTO:
                raise
            # Its plan says what is missing.
            choice, layout, args.split_weight = None, layouts[0], args.split_weight in (True, "on")
    return replace(
        of_model,
        layout=layout,
        choice=choice,
        kind="" if choice and text is None else kind,
        splits_weight=args.split_weight in (True, "on"),
        has_whole_logits=has_whole_logits,
    )


def _whole_logits(args: argparse.Namespace, source: Profile, longest: int) -> WholeLogits | None:
    """Return the costs of a loss without blocks; None if a flag or the costs say what it is, or there are none."""
    if args.costs is not None or args.loss_block_tokens is not None:
        return None
    whole = argparse.Namespace(**vars(args) | {"loss_block_tokens": 0})
    profile, _ = costs_source(whole, longest)
    if profile == source or not isinstance(profile, Profile):
        return None
    return WholeLogits(lambda layout: costs_by(whole, profile, layout), args.context or longest)


def balanced_at(args: argparse.Namespace, layout: Layout, lengths: Sequence[int]) -> Layout:
    """Return balanced layers at the placement of a schedule; its own layout if its layers cannot be moved."""
    source, num_layers = costs_source(args, max(lengths))
    if not layout.is_movable or not isinstance(source, Profile):
        return layout
    ranks = layout.placement.rank_of
    layers = balanced_layers(source, num_layers, len(ranks), lengths, ranks, shards_vocabulary=layout.shards_vocabulary)
    return Layout.of_layers(layers, layout.placement, shards_vocabulary=layout.shards_vocabulary)


def _of_text(args: argparse.Namespace, profile: Profile, num_layers: int, lengths: tuple[int, ...], *, shards: bool) -> Layout:
    """Return the layout of even or balanced layers, or the given one."""
    ranks = pipeline_ranks(args)
    if args.layout not in (None, AUTO, EVEN, BALANCED):
        layout = _given(args, num_layers)
        if pattern_of(flags_of(args)) and not layout.is_whole:
            raise EppError(f"--layout {args.layout} cuts layers, and those of a hybrid model have one part: give whole layers")
        return replace(layout, shards_vocabulary=layout.shards_vocabulary or shards)
    layers = even_layers(num_layers, ranks)
    if args.layout != EVEN:
        layers = balanced_layers(profile, num_layers, ranks, lengths, shards_vocabulary=shards)
    return Layout.of_layers(layers, Placement("looped", ranks, 1), shards_vocabulary=shards)


def _sample(
    args: argparse.Namespace,
    profile: Profile,
    num_layers: int,
    batches: Sequence[tuple[int, ...]],
    planners: Sequence[str],
) -> Sample:
    """Return what the search for a layout needs: batches, costs, and the layouts that are allowed."""
    own = even(num_layers, pipeline_ranks(args)) if args.layout in (None, AUTO, EVEN, BALANCED) else _given(args, num_layers)
    planner = planners[0] if len(planners) == 1 else "greedy"
    may_search = all(map(begins_with_greedy, planners))
    divides = "off" if args.vocab_parallel == AUTO and not may_search else args.vocab_parallel
    return Sample(
        problems=tuple(problem_of(args, lengths, own.placement) for lengths in batches),
        costs_of=lambda layout: costs_by(args, profile, layout),
        num_layers=num_layers,
        options=options_from(args, planner=planner),
        placements=() if may_search else (own.placement,),
        vocabulary=_vocabulary(divides, own.placement.num_ranks),
        halves=not pattern_of(flags_of(args)),
    )


def _vocabulary(setting: str, num_ranks: int) -> tuple[bool, ...]:
    """Return whether the vocabulary may be on the last stage, over all ranks, or either. Raises `EppError` for one rank."""
    if setting == "on" and num_ranks == 1:
        raise EppError("--vocab-parallel on divides the vocabulary over pipeline ranks, and --stages is 1: leave it out")
    either = (False, True) if num_ranks > 1 else (False,)
    return {"off": (False,), "on": (True,), "auto": either}[setting]


def _given(args: argparse.Namespace, num_layers: int) -> Layout:
    """Return the layout of a list of layers or of a file, which must be of the model and of the ranks that flags name."""
    kind, colon, words = args.layout.rpartition(":")
    text, halves = args.layout, parse_layers(words if kind in KINDS else args.layout)
    if halves is not None and colon:
        layout = Layout(halves, _several(kind, len(halves), pipeline_ranks(args)))
        layout.check(num_layers, pipeline_ranks(args))
        return layout
    if halves is not None:
        ranks = args.stages or len(halves)
        if len(halves) != ranks or sum(halves) != 2 * num_layers:
            raise EppError(
                f"--layout {brief(text)} has {len(halves)} stages and {sum(halves) / 2:g} layers: {_wanted(ranks, num_layers)}"
            )
        return Layout(halves, Placement("looped", ranks, 1))
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file:
        wanted = _wanted(pipeline_ranks(args), num_layers)
        raise EppError(f"--layout {brief(text)}: {wanted}{nearest(text, (AUTO, BALANCED, EVEN))}")
    with naming_file(f"--layout {text}"):
        layout = Layout.from_json(read_text(text))
        if args.stages is not None and args.stages != layout.placement.num_ranks:
            raise EppError(
                f"a layout for {layout.placement.num_ranks} pipeline ranks, and --stages is {args.stages}: leave --stages out, "
                "or give another layout"
            )
        layout.check(num_layers, layout.placement.num_ranks)
    return layout


def _several(kind: str, num_stages: int, ranks: int) -> Placement:
    """Return the placement of that many stages. Raises `EppError` unless all ranks have equally many, and two in a V."""
    if num_stages % ranks or (kind == "v" and num_stages != 2 * ranks):
        wanted = f"{2 * ranks} stages, two on each" if kind == "v" else "a multiple of as many stages"
        raise EppError(f"--layout {kind}: has {num_stages} stages for {ranks} ranks (--stages): give {wanted}")
    return Placement("v" if kind == "v" else "looped", ranks, num_stages // ranks)


def _wanted(ranks: int, num_layers: int) -> str:
    return (
        f"give auto, even, balanced, a layout file, or {ranks} multiples of 0.5 (one for each of --stages) that add up to "
        f"{num_layers} (--layers)"
    )


def _of_stages(args: argparse.Namespace, stored: PipelineCosts, ranks: int) -> Layout:
    """Return the layout of costs of a whole pipeline."""
    with naming_file(f"--costs {args.costs}"):
        if args.layout is not None:
            raise EppError("the stages have layers of their own: leave --layout out")
        if len(stored.stages) != ranks:
            raise EppError(f"these are costs of {len(stored.stages)} stages, not of {ranks}: change --stages")
    return Layout.of_layers(stored.num_layers, Placement("looped", ranks, 1))
