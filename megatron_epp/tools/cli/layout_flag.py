"""``--layout``: the layers of every stage and their ranks, given, even, balanced, or searched for the batches."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.layer_flags import whole_pattern
from megatron_epp.plan.layout import Layout, even_layers, layers_text, parse_layers, staged_pattern
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import begins_with_greedy
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.reading import brief, naming_file, nearest, read_text
from megatron_epp.planner.latents_choice import LatentsTrial, choose_latents
from megatron_epp.tools.cli.planning_flags import costs_by, costs_of, costs_source, flags_of, has_costs_of_stages, problem_of
from megatron_epp.tools.cli.terminal import PROGRAM, progress, tell
from megatron_epp.tools.formulas import Profile
from megatron_epp.tools.formulas.library import balanced_layers
from megatron_epp.tools.layouts.layout_choice import LayoutChoice, Sample, WholeLogits, settle
from megatron_epp.tools.report.text import format_us

AUTO, BALANCED, EVEN = "auto", "balanced", "even"
KINDS = ("looped", "v")  # placements of several stages per rank that a list of layers may begin with, as in ``v:8,8,8,8``
_STAGES = 4  # pipeline ranks where neither ``--stages`` nor a layout says how many


@dataclass(frozen=True, slots=True)
class Chosen:
    """The layout of a command, the search that found it (None if there was none), and its kind if it is even or balanced."""

    layout: Layout
    choice: LayoutChoice | None = None
    kind: str = ""

    def lines(self, args: argparse.Namespace) -> list[str]:
        """Describe the layout, in lines: none for even layers on one stage per rank that were asked for."""
        layout, placement, choice, flags = self.layout, self.layout.placement, self.choice, flags_of(args)
        is_even = placement.num_chunks == 1 and layout == even(layout.num_layers, placement.num_ranks) and choice is None
        line = f"layout: {f'{self.kind}, ' * bool(self.kind)}{layout.text()}"
        if is_even:
            return [line] * (self.kind == BALANCED)
        if choice is not None:
            line += f"; {format_us(choice.makespan_us)} expected, at least {format_us(choice.bound_us)} in any order"
            line += f", {format_us(choice.even_us)} with even layers ({choice.gain:.1%} saved)"
        in_a_v = " --epp-placement v" * (not placement.is_looped)
        if placement.kind == "ring":
            own = f"--num-virtual-stages-per-pipeline-rank {placement.num_chunks}"
        elif pattern := whole_pattern(flags):
            own = f"--hybrid-layer-pattern '{staged_pattern(pattern, layout.layers)}'" + in_a_v
        elif (megatron := layout.to_megatron(flags.get("mtp_num_layers") or 0)) is not None:
            own = f"--pipeline-model-parallel-layout '{megatron}'"
        else:
            own = f"--epp-layout {layers_text(layout.layers, ',')}" + in_a_v
        own += " --epp-vocab-parallel on" * layout.shards_vocabulary + " --epp-split-weight-gradient" * args.split_weight
        return [line, f"in training: {own}" + " --epp-loss-block-tokens 0" * (args.loss_block_tokens == 0)]


def even(num_layers: int, num_ranks: int) -> Layout:
    """Return one stage per rank and even layers. Raises `EppError` if there are more ranks than layers."""
    return Layout(even_layers(num_layers, num_ranks), Placement("looped", num_ranks, 1))


def pipeline_ranks(args: argparse.Namespace) -> int:
    return args.stages or _STAGES


def settle_latents(args: argparse.Namespace, batches: Sequence[Lengths], planners: Sequence[str] | None = None) -> None:
    """Settle ``--latents auto`` in parsed flags by plans for batches. Raises `EppError` where ``on`` makes no sense."""
    has_latents, is_fixed = bool(flags_of(args).get("multi_latent_attention")), has_costs_of_stages(args)
    if args.latents == "on" and not has_latents:
        raise EppError("--latents on is for a model with latent attention: give one with --model, or leave it out")
    if args.latents == "on" and is_fixed:
        raise EppError(f"--costs {args.costs} has costs of a pipeline, which know what slices hand on: leave --latents out")
    if args.latents not in ("on", "off") and (not has_latents or is_fixed):
        args.latents = "off"
    if args.latents in ("on", "off"):
        return
    # Where both are tried, no layout is searched that is not asked for
    vocabulary, splits = "on" if args.vocab_parallel == "on" else "off", args.split_weight in (True, "on")
    unsearched = {"layout": args.layout or BALANCED, "vocab_parallel": vocabulary, "split_weight": splits}

    def trial(choice: str) -> LatentsTrial:
        settings = argparse.Namespace(**vars(args) | unsearched | {"latents": choice})
        layout = chosen_layout(settings, batches, planners).layout
        problems = [problem_of(settings, batch, layout.placement) for batch in batches]
        return LatentsTrial(problems, costs_of(settings, _joined(batches), layout), options_from(args, planner="greedy"))

    with progress("planning with latents, and with keys and values"):
        choice = choose_latents(trial)
    args.latents = "on" if choice.relays_latents else "off"
    tell(f"{PROGRAM}: --latents {args.latents}: {choice}")


def chosen_layout(args: argparse.Namespace, batches: Sequence[Lengths], planners: Sequence[str] | None = None) -> Chosen:
    """Return the layout that flags give, balanced or searched for batches of typical lengths and for planners.

    Settles flags that go with it in `args`. Raises `EppError` if it is not of this model or of these ranks.
    """
    longest = max(_joined(batches), default=0)
    source, num_layers = costs_source(args, longest)
    text, flags = args.layout, flags_of(args)
    if isinstance(source, PipelineCosts):
        args.split_weight = args.split_weight in (True, "on")
        return Chosen(_of_stages(args, source, pipeline_ranks(args)))
    with nullcontext() if args.costs is None else naming_file(f"--costs {args.costs}"):
        named = text not in (None, AUTO, EVEN, BALANCED)
        own = _given(args, num_layers) if named else even(num_layers, pipeline_ranks(args))
        sample = _sample(args, source, own, batches, planners or [args.planner])
        layouts = [_of_text(args, source, own, batches, shards=shards) for shards in sample.vocabulary]
        kind = BALANCED if text is None else text if text in (EVEN, BALANCED) else ""
        is_greedy = all(map(begins_with_greedy, planners or [args.planner]))
        searches = text == AUTO or (text is None and is_greedy)
        opens_weights = args.split_weight == AUTO and (searches or is_greedy)
        layout, choice, splits, several = layouts[0], None, False, searches or len(layouts) > 1
        if several or opens_weights:
            try:
                with progress("choosing the layout" if several else "choosing about weight gradients"):
                    searched, answer = settle(
                        sample,
                        tensor_ranks=flags.get("tensor_model_parallel_size") or 1,
                        opens_weights=opens_weights,
                        layouts=() if searches else layouts,
                        logits=_whole_logits(args, source, longest) if searches else None,
                    )
                layout, splits, choice = answer.layout, answer.splits_weights, searched if several else None
                args.loss_block_tokens = 0 if answer.has_whole_logits else args.loss_block_tokens
            except InfeasibleError:
                if text == AUTO:  # otherwise its plan says what is missing
                    raise
    args.split_weight = splits if args.split_weight == AUTO else args.split_weight in (True, "on")
    return Chosen(layout, choice, "" if choice and text is None else kind)


def _joined(batches: Sequence[Lengths]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(batch.lengths for batch in batches))


def _whole_logits(args: argparse.Namespace, source: Profile, longest: int) -> WholeLogits | None:
    """Return the costs of a loss without blocks; None if a flag or the costs say what it is, or there are none."""
    if args.costs is not None or args.loss_block_tokens is not None:
        return None
    whole = argparse.Namespace(**vars(args) | {"loss_block_tokens": 0})
    profile, _ = costs_source(whole, longest)
    if profile == source or not isinstance(profile, Profile):
        return None
    return (lambda layout: costs_by(whole, profile, layout)), args.context or longest


def _of_text(args: argparse.Namespace, profile: Profile, own: Layout, batches: Sequence[Lengths], *, shards: bool) -> Layout:
    """Return balanced layers at the ranks of `own`, or `own` itself where the flag says its layers."""
    if args.layout not in (None, AUTO, BALANCED):
        return replace(own, shards_vocabulary=own.shards_vocabulary or shards)
    layers = balanced_layers(profile, own.num_layers, own.placement.num_ranks, batches, shards_vocabulary=shards)
    return Layout(layers, own.placement, shards_vocabulary=shards)


def _sample(
    args: argparse.Namespace, profile: Profile, own: Layout, batches: Sequence[Lengths], planners: Sequence[str]
) -> Sample:
    """Return what a search needs. Raises `EppError` if the vocabulary is to be divided over one rank."""
    may_search, is_one = all(map(begins_with_greedy, planners)), own.placement.num_ranks == 1
    if args.vocab_parallel == "on" and is_one:
        raise EppError("--vocab-parallel on divides the vocabulary over pipeline ranks, and --stages is 1: leave it out")
    either = (False, True) if may_search and not is_one else (False,)
    return Sample(
        problems=tuple(problem_of(args, batch, own.placement) for batch in batches),
        costs_of=lambda layout: costs_by(args, profile, layout),
        num_layers=own.num_layers,
        options=options_from(args, planner=planners[0] if len(planners) == 1 else "greedy"),
        placements=() if may_search else (own.placement,),
        vocabulary={"off": (False,), "on": (True,), AUTO: either}[args.vocab_parallel],
    )


def _given(args: argparse.Namespace, num_layers: int) -> Layout:
    """Return the layout of a list of layers or of a file, which must be of the model and of the ranks that flags name."""
    text, (kind, _, words) = args.layout, args.layout.rpartition(":")
    with naming_file(f"--layout {brief(text)}"):
        listed, placed = parse_layers(text), parse_layers(words) if kind in KINDS else None
    ranks = pipeline_ranks(args) if listed is None else args.stages or len(listed)
    if placed is not None:
        num_stages = len(placed)
        if num_stages % ranks or (kind == "v" and num_stages != 2 * ranks):
            stages = f"{2 * ranks} stages, two on each" if kind == "v" else "a multiple of as many stages"
            raise EppError(f"--layout {kind}: has {num_stages} stages for {ranks} ranks (--stages): give {stages}")
        layout = Layout(placed, Placement("v" if kind == "v" else "looped", ranks, num_stages // ranks))
        layout.check(num_layers, ranks)
        return layout
    wanted = f"give auto, even, balanced, a layout file, or {ranks} whole numbers (one for each of --stages) that add up to "
    wanted += f"{num_layers} (--layers)"
    if listed is not None:
        if len(listed) != ranks or sum(listed) != num_layers:
            raise EppError(f"--layout {brief(text)} has {len(listed)} stages and {sum(listed)} layers: {wanted}")
        return Layout(listed, Placement("looped", ranks, 1))
    if not os.path.isfile(text):
        raise EppError(f"--layout {brief(text)}: {wanted}{nearest(text, (AUTO, BALANCED, EVEN))}")
    with naming_file(f"--layout {text}"):
        layout = Layout.from_json(read_text(text))
        its_own = layout.placement.num_ranks
        if args.stages not in (None, its_own):
            raise EppError(f"a layout for {its_own} pipeline ranks, and --stages is {args.stages}: leave --stages out")
        layout.check(num_layers, its_own)
    return layout


def _of_stages(args: argparse.Namespace, stored: PipelineCosts, ranks: int) -> Layout:
    with naming_file(f"--costs {args.costs}"):
        if args.layout is not None:
            raise EppError("the stages have layers of their own: leave --layout out")
        if len(stored.stages) != ranks:
            raise EppError(f"these are costs of {len(stored.stages)} stages, not of {ranks}: change --stages")
    return Layout(stored.num_layers, Placement("looped", ranks, 1))
