"""The command that sets planners side by side, over one batch or several, each with its best packing size."""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from typing import Any

from megatron_epp.mcore.arguments.flag import planner
from megatron_epp.mcore.arguments.parser import names_of, options_from
from megatron_epp.mcore.arguments.table import PLANNER_NAMES
from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.plan_figures import recompute_share
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.reading import brief_text
from megatron_epp.planner import PLANNERS, plan
from megatron_epp.planner.chunks.chunker import round_up
from megatron_epp.tools.advice.causes import PLANNER, STAGES_PER_RANK, Gain, Stock, StockChoices, stock_text, without_shards
from megatron_epp.tools.cli import planning_flags, terminal
from megatron_epp.tools.cli.layout_flag import BALANCED, Chosen, chosen_layout, even, settle_latents
from megatron_epp.tools.cli.lengths import batches_of
from megatron_epp.tools.cli.planning_flags import as_trained, costs_source, problem_of, token_multiple
from megatron_epp.tools.cli.schedules import ALL, layout_at, usual
from megatron_epp.tools.cli.terminal import Parser, is_page, progress, say
from megatron_epp.tools.formulas import Profile
from megatron_epp.tools.report.gantt import save_picture, side_by_side
from megatron_epp.tools.report.page.html import Shown, save_page
from megatron_epp.tools.report.text import comparison

EXAMPLE = """\
example: 512 documents like Wikipedia's on eight stages, and a picture of all plans
  megatron-epp compare --lengths wikipedia --model llama3-8b --cluster h100x8 --stages 8 \\
    --context 65536 -o compared.png
one planner of a paper against ours
  megatron-epp compare --lengths 9000,4000,800,800 --planner greedy --planner zb-v
"""
_IN_ROWS = ("1f1b-packed", "1f1b-padded")  # planners that fill rows of whole sequences up to `context`, which is their size
_MOST_SIZES = 5  # most packing sizes that are tried for a planner
_MOST_ACTIONS = 1 << 15
"""Most chunks times stages, over all sizes together, that are tried for a planner: large batches take long to plan."""


@dataclass(frozen=True, slots=True)
class Entry:
    planner: str  # its name
    plan: Plan | None  # None where there is none
    refusal: str  # why there is none
    planning_ms: float  # processor time
    note: str = ""  # what the exact planner says of its plan
    # Most tokens of a chunk or row that it packs and cuts to; None if it has no limit, or chooses sizes itself
    size: int | None = None


def _speed(entry: Entry) -> float:
    return math.inf if entry.plan is None else entry.plan.predicted.makespan_us


def add_arguments(parser: Parser) -> None:
    planning_flags.add_problem(parser, several_batches=True)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON, a row per batch and planner")
    every = f"{ALL}: every one, fastest first, planners of other placements with layers of their own"
    names = f"a planner to compare, {PLANNER_NAMES}; repeat it for more. {every} (default: {', '.join(usual())})"
    parser.add_argument(
        "--planner", action="append", type=lambda text: text if text == ALL else planner(text), metavar="NAME", help=names
    )
    below = "the plans of one batch below each other, as .html to explore, .png, .svg or .pdf (default: none)"
    terminal.add_output(parser, below, type=terminal.picture_or_page)


@dataclass(frozen=True, slots=True)
class Batch:
    args: argparse.Namespace  # parsed flags
    name: str
    sequences: Lengths
    longest: int  # tokens of the longest sequence of all batches
    chosen: Chosen  # the layout; a planner that needs another placement has even or balanced layers at that
    entries: list[Entry] = field(default_factory=list)  # results of the planners


type StockGain = tuple[Stock | None, Gain] | None
"""Megatron's own schedule at its best, and the gain of "greedy" over it; None where they are not compared."""


def run(args: argparse.Namespace) -> int:
    """Compare all planners on all batches. Raises `EppError` if the arguments make no sense, or matplotlib is missing."""
    of_names, asked = zip(*batches_of(args), strict=True)
    if args.output and len(asked) > 1:
        raise EppError(f"-o draws the plans of one batch, there are {len(asked)}: give --lengths once")
    names = list(dict.fromkeys(sorted(PLANNERS) if ALL in (args.planner or ()) else args.planner or usual()))
    planning_flags.tell_sharing(args)
    typical = as_trained(args, *asked)
    settle_latents(args, typical, names)
    chosen, longest = chosen_layout(args, typical, names), max(max(sequences.lengths) for sequences in typical)
    batches = [Batch(args, name, sequences, longest, chosen) for name, sequences in zip(of_names, typical, strict=True)]
    of_all = f"of {len(names) * len(batches)} plans, each with its best size"
    with progress("planning", lambda: f"{sum(len(each.entries) for each in batches)} {of_all}"):
        for batch in batches:
            for name in names:  # if nothing can be planned, the refusal is that of the flags' size
                sizes = (None, *sizes_of(args, batch.sequences.lengths, chosen.layout.placement.num_ranks, name))
                batch.entries.append(min((_entry(batch, name, size) for size in sizes), key=_speed))
        gains = [*map(_gain, batches)]
    if ALL in (args.planner or ()):
        for batch in batches:
            batch.entries.sort(key=_speed)  # those without a plan go last
    plans = [(entry.planner, entry.plan) for batch in batches for entry in batch.entries if entry.plan is not None]
    if args.output and is_page(args.output):
        save_page([Shown(name, shown_plan) for name, shown_plan in plans], args.output)
    elif args.output:
        save_picture(side_by_side(plans), args.output)
    paired = [*zip(batches, gains, strict=True)]
    if args.json:
        common = {"layers": args.layout or BALANCED, "latents": args.latents == "on"}
        say(json.dumps([_row(batch, entry, gain) | common for batch, gain in paired for entry in batch.entries], indent=1))
        return 0
    texts = [_text(batch, gain, titled=len(batches) > 1) for batch, gain in paired]
    say("\n\n".join([*texts, *["\n".join(lines) for lines in [chosen.lines(args)] if lines and plans]]))
    return 0


def sizes_of(args: argparse.Namespace, lengths: tuple[int, ...], num_ranks: int, name: str) -> list[int]:
    """Return powers of two to try with a planner besides its default size, none if flags give one, within `_MOST_ACTIONS`.

    Rows of whole sequences are as long as the longest, or longer; chunks at most half as long, which is then cut.
    """
    longest, multiple, entry = max(lengths), token_multiple(args), PLANNERS.entry(name)
    if args.chunk_tokens is not None or args.slices is not None or entry is None or entry.has_own_size:
        return []
    powers = [size for size in (1 << power for power in range(64)) if size % multiple == 0]
    if name in _IN_ROWS:
        whole, most = round_up(longest, multiple), args.context or sum(lengths)
        sizes = sorted({whole, *(size for size in powers if whole <= size <= most)})[:_MOST_SIZES]
    else:
        sizes = [size for size in powers if size <= longest // 2][: -_MOST_SIZES - 1 : -1]
    actions = accumulate((len(lengths) + sum(lengths) // size) * num_ranks for size in sizes)
    return sorted(size for size, so_far in zip(sizes, actions, strict=True) if so_far <= _MOST_ACTIONS)


def _entry(batch: Batch, name: str, size: int | None) -> Entry:
    """Plan one batch with one planner, with a size of its rows or chunks; None for the flags' size."""
    args, lengths, start_s, known = batch.args, batch.sequences.lengths, time.process_time(), PLANNERS.entry(name)
    try:
        layout = layout_at(args, batch.chosen, name, batch.sequences)
        options = options_from(args, planner=name)
        if size is not None:
            options = replace(options, context=size) if name in _IN_ROWS else replace(options, chunk_tokens=size)
        if known is not None:
            split, offload = options.split_weight or known.splits_weight, options.offload or known.offloads
            options = replace(options, split_weight=split, offload=offload)
        with terminal.latest_message(terminal.EXACT_PLANNER_LOG) as latest:
            costs = planning_flags.costs_of(args, lengths, layout, batch.longest)
            planned, refusal = plan(problem_of(args, batch.sequences, layout.placement), costs, options), ""
    except EppError as error:
        planned, refusal = None, error.text(names_of(args.parser))
    note = "" if planned is None else latest()
    if size is None:
        row = args.context or round_up(max(lengths), token_multiple(args))
        size = row if name in _IN_ROWS else args.chunk_tokens
    return Entry(name, planned, refusal, (time.process_time() - start_s) * 1e3, note, size)


def _gain(batch: Batch) -> StockGain:
    """Compare with Megatron's own schedule, with several stages per rank only where the layout has, or was searched."""
    args, (lengths, *_, borrowed), chosen = batch.args, batch.sequences, batch.chosen
    plans = {entry.planner: entry.plan for entry in batch.entries}
    ours, source = plans.get("greedy"), costs_source(args, batch.longest)[0]
    if ours is None or PLANNER not in plans or args.forward_only or not isinstance(source, Profile):
        return None
    alone = argparse.Namespace(**vars(args) | {"loss_block_tokens": 0, "latents": "off"})
    whole, _ = costs_source(alone, batch.longest)
    assert isinstance(whole, Profile)  # as the other
    layout, options, num_layers = chosen.layout, options_from(args, planner="greedy"), chosen.layout.num_layers
    problem = problem_of(args, Lengths(lengths), layout.placement)
    own_costs_of = cache(partial(planning_flags.costs_by, args, source))
    best_us = alone_us = whole_us = ours.predicted.makespan_us
    if borrowed:
        alone_us = whole_us = math.inf
        with suppress(InfeasibleError):
            alone_us = whole_us = plan(problem, own_costs_of(layout), options).predicted.makespan_us
    if layout.shards_vocabulary or options.split_weight:
        whole_us, options_then = math.inf, replace(options, split_weight=False)
        for other in without_shards(layout, problem, own_costs_of):
            with suppress(InfeasibleError):
                whole_us = min(whole_us, plan(problem, own_costs_of(other), options_then).predicted.makespan_us)
    choices = StockChoices(
        problems=(problem,),
        costs_of=cache(partial(planning_flags.costs_by, alone, whole)),
        own_costs_of=own_costs_of,
        num_layers=num_layers,
        context=args.context or max(lengths),
        options=options,
        even=even(num_layers, layout.placement.num_ranks),
        counts=STAGES_PER_RANK if chosen.choice is not None or layout.placement.num_chunks > 1 else (1,),
        layouts=(layout,),
    )
    steps = choices.steps()
    return steps[-1], Gain.of((*steps, choices.by_chunk(steps[-1])), whole_us, *[alone_us] * bool(borrowed), best_us)


def _text(batch: Batch, gain: StockGain, titled: bool) -> str:
    lengths, entries = batch.sequences.lengths, batch.entries
    lines = [f"{brief_text(batch.name)}: {len(lengths):,} sequences of up to {max(lengths):,} tokens"] if titled else []
    sizes = ("own" if entry.size is None else f"{entry.size:,}" for entry in entries)
    lines.append(comparison([(entry.planner, entry.plan, size) for entry, size in zip(entries, sizes, strict=True)]))
    lines.append("size: most tokens of a chunk or row, the fastest of those tried; own: the planner chooses, or has no limit")
    for is_so, what, flag in (
        ("splits_weight", "weight gradients are split off in", "--split-weight in all"),
        ("offloads", "activations may be offloaded in", "--offload in all"),
        ("joins", "exchanges are overlapped in", "--overlap-exchanges in greedy"),
    ):
        names = [entry.planner for entry in entries if entry.plan and getattr(PLANNERS.entry(entry.planner), is_so, False)]
        lines += [f"{what} {', '.join(names)}; with {flag}"] * bool(names)
    if batch.sequences.borrowed:
        shared = {entry.planner: entry.plan.num_shared_tokens for entry in entries if entry.plan}
        once = f"of {sum(lengths):,} tokens are in common with others and run once"
        lines += [f"{name}: {count:,} {once}" for name, count in shared.items() if count]
        alone = ", ".join(name for name, count in shared.items() if not count)
        lines += [f"{alone}: every sequence runs whole"] * bool(alone)
    lines += [f"{entry.planner}: {entry.note}" for entry in entries if entry.note]
    lines += [f"{entry.planner}: no plan. {entry.refusal}" for entry in entries if entry.plan is None]
    if gain is not None:
        stock, causes = gain
        own = "nothing fits" if stock is None else stock_text(stock)
        lines += ["", *causes.lines(), f"Megatron's own at its best: {own}"]
        lines.append("(several stages on each rank only where plans may have them: --layout auto, or one with several)")
    return "\n".join(lines)


def _row(batch: Batch, entry: Entry, gain: StockGain) -> dict[str, Any]:
    row: dict[str, Any] = {"batch": batch.name, "sequences": len(lengths := batch.sequences.lengths), "tokens": sum(lengths)}
    row |= {name: getattr(entry, name) for name in ("planner", "planning_ms", "size", *["note"] * bool(entry.note))}
    if entry.plan is None:
        return row | {"refusal": entry.refusal}
    predicted, best_us = entry.plan.predicted, min(map(_speed, batch.entries))
    row |= {"makespan_us": predicted.makespan_us, "makespan_over_best": predicted.makespan_us / best_us}
    row |= {name: getattr(predicted, name) for name in ("lower_bound_us", "bubble_fraction", "peak_bytes")}
    row |= {"cap_bytes": entry.plan.cap_bytes, "recompute_share": recompute_share(entry.plan), "chunks": len(entry.plan.chunks)}
    return row | ({"gain": gain[1].as_json()} if gain is not None and entry.planner == "greedy" else {})
