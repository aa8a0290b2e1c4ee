"""The command that sets planners side by side, over one batch or several, each with its best packing size and layers."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

from megatron_epp.cli.inputs import EVERYDAY_PROBLEM, add_problem, costs_of, problem_of, tell_sharing
from megatron_epp.cli.layout import BALANCED, EVEN, Chosen, balanced_at, chosen_layout, latents_to_try
from megatron_epp.cli.lengths import batches_of
from megatron_epp.cli.schedules import ALL, layout_for, usual
from megatron_epp.cli.terminal import (
    EXACT_PLANNER_LOG,
    Command,
    Parser,
    add_output,
    is_page,
    latest_message,
    picture_or_page,
    progress,
    say,
)
from megatron_epp.mcore.arguments.flag import planner
from megatron_epp.mcore.arguments.parser import names_of, options_from
from megatron_epp.mcore.arguments.table import PLANNER_NAMES
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.plan import Plan
from megatron_epp.planner import PLANNERS, plan
from megatron_epp.planner.chunks.chunker import round_up
from megatron_epp.report.facts import recompute_share
from megatron_epp.report.gantt import save_picture, side_by_side
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.text import comparison

_EXAMPLE = """\
example: 512 documents like Wikipedia's on eight stages, and a picture of all plans
  megatron-epp compare --lengths wikipedia --model llama3-8b --cluster h100x8 --stages 8 \\
    --context 65536 -o compared.png
one planner of a paper against ours
  megatron-epp compare --lengths 9000,4000,800,800 --planner greedy --planner zb-v
"""
BEST = "best"
"""Value of ``--layout`` with which each planner gets the faster of even and balanced layers; costs of stages have their own."""
_IN_ROWS = {"1f1b-packed": "rows of", "1f1b-padded": "rows of"}
"""Planners that fill rows of whole sequences up to `context`, which is their size."""
_MOST_SIZES = 5
"""Most packing sizes that are tried for a planner."""
_MOST_ACTIONS = 1 << 15
"""Most chunks times stages, over all sizes together, that are tried for a planner: large batches take long to plan."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Result of one planner for one batch, with the size and the layers that are best for it.

    Attributes:
        planner: its name.
        plan: None where there is none.
        refusal: why there is none.
        planning_ms: processor time.
        note: what the exact planner says of its plan.
        layers: which layers the stages have: even, balanced, or the given ones.
        latents: slices hand on latents.
        size: most tokens of a chunk or row that it packs and cuts to; None if it has no limit, or chooses sizes itself.
    """

    planner: str
    plan: Plan | None
    refusal: str
    planning_ms: float
    note: str = ""
    layers: str = BALANCED
    size: int | None = None
    latents: bool = False

    @property
    def makespan_us(self) -> float:
        return math.inf if self.plan is None else self.plan.predicted.makespan_us


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add_problem(parser, several_batches=True)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON, a row per batch and planner")
    parser.add_argument(
        "--planner",
        action="append",
        type=lambda text: text if text == ALL else planner(text),
        metavar="NAME",
        help=f"a planner to compare, {PLANNER_NAMES}; repeat it for more. {ALL}: every one, fastest first, planners of other "
        f"placements with layers of their own (default: {', '.join(usual())})",
    )
    for action in parser._actions:
        if action.dest == "layout":
            action.help = str(action.help).replace(
                "(default", f"; {BEST}: the faster of even and balanced, by planner (default"
            )
    below = "the plans of one batch below each other, .html to explore, .png, .svg or .pdf as a picture (default: none)"
    add_output(parser, below, type=picture_or_page)


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Raises `EppError`."""
    say(compare(args))
    return 0


def compare(args: argparse.Namespace) -> str:
    """Compare all planners on all batches, as text or with ``--json`` as JSON; ``--output`` draws the plans of one batch.

    Raises:
        EppError: the arguments make no sense, or matplotlib is missing.
    """
    batches = batches_of(args)
    if args.output and len(batches) > 1:
        raise EppError(f"-o draws the plans of one batch, there are {len(batches)}: give --lengths once")
    names = list(dict.fromkeys(sorted(PLANNERS) if ALL in (args.planner or ()) else args.planner or usual()))
    choices = [_with(args, latents=choice) for choice in latents_to_try(args)]
    layouts = _layouts(choices[-1], [lengths for _, lengths in batches], names)  # with latents more of them fit
    tell_sharing(args)
    tokens = [length for _, lengths in batches for length in lengths]
    total, tables = len(names) * len(batches), []
    entries: list[Entry] = []
    with progress("planning", lambda: f"{len(entries)} of {total} plans, each with its best size and layers"):
        for _, lengths in batches:
            for name in names:
                ours = next(
                    (entry for entry in entries[len(entries) // len(names) * len(names) :] if entry.planner == "greedy"), None
                )
                each = [_best(kind, lengths, tokens, layouts, name, ours) for kind in choices]
                entries.append(min(each, key=lambda entry: entry.makespan_us))
    if ALL in (args.planner or ()):
        entries = _ranked(entries, len(names))
    if args.output:
        _draw(args.output, [(entry.planner, entry.plan) for entry in entries if entry.plan is not None])
    for number, (name, lengths) in enumerate(batches):
        tables.append((name, lengths, entries[number * len(names) : (number + 1) * len(names)]))
    if args.json:
        return json.dumps([_row(*table, entry) for table in tables for entry in table[2]], indent=1)
    texts = [_text(*table, titled=len(tables) > 1) for table in tables]
    used = {entry.layers for entry in entries if entry.plan is not None}
    lines = [line for kind, chosen in layouts.items() if kind in used for line in chosen.lines()]
    return "\n\n".join(texts + ["\n".join(lines)] * bool(lines))


def _layouts(args: argparse.Namespace, batches: Sequence[tuple[int, ...]], names: Sequence[str]) -> dict[str, Chosen]:
    """Return the layouts to try, by name: the given one, balanced layers, or even and balanced ones."""
    if args.layout != BEST:
        return {args.layout or BALANCED: chosen_layout(args, batches, names)}
    return {kind: chosen_layout(_with(args, layout=kind), batches, names) for kind in (EVEN, BALANCED)}


def _with(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


def _best(
    args: argparse.Namespace,
    lengths: tuple[int, ...],
    tokens: list[int],
    layouts: Mapping[str, Chosen],
    name: str,
    ours: Entry | None = None,
) -> Entry:
    """Plan one batch with one planner: with its best layers and, with these, its best size, under the same caps.

    If nothing can be planned, the refusal is the one for the size and layers that are tried first.

    Args:
        args, lengths, tokens, name: as in `_entry`.
        ours: the greedy planner's best entry, where it is known: the exact planner takes long, and begins with that entry.
    """
    entry = PLANNERS.entry(name)
    if entry is not None and entry.begins_with_greedy and name != "greedy":
        like = ours or _best(args, lengths, tokens, layouts, "greedy")
        return _entry(args, lengths, tokens, layouts[like.layers].layout, name, like.layers, like.size)
    tried = [_entry(args, lengths, tokens, chosen.layout, name, kind) for kind, chosen in layouts.items()]
    first = min(tried, key=lambda entry: entry.makespan_us)
    tried += [
        _entry(args, lengths, tokens, layouts[first.layers].layout, name, first.layers, size)
        for size in sizes_of(args, lengths, layouts[first.layers].layout.placement.num_ranks, name)
    ]
    return min((first, *tried), key=lambda entry: entry.makespan_us)


def sizes_of(args: argparse.Namespace, lengths: tuple[int, ...], num_ranks: int, name: str) -> list[int]:
    """Return the sizes to try with a planner besides its default: powers of two, and no more than `_MOST_SIZES`.

    Rows of whole sequences are as long as the longest, or longer. Chunks are at most half of the longest, which is then cut;
    the longest are tried first, as far as the work allows (`_MOST_ACTIONS`).

    Args:
        args: parsed flags; with ``--chunk-tokens`` or ``--slices`` there is nothing to try.
    """
    longest, multiple = max(lengths), args.token_multiple
    entry = PLANNERS.entry(name)
    if args.chunk_tokens is not None or args.slices is not None or entry is None or entry.has_own_size:
        return []
    if name in _IN_ROWS:
        whole, most = round_up(longest, multiple), args.context or sum(lengths)
        sizes = sorted({whole, *(size for size in _powers(whole, most) if size % multiple == 0)})[:_MOST_SIZES]
    else:
        sizes = [size for size in _powers(max(multiple, 1), longest // 2) if size % multiple == 0][: -_MOST_SIZES - 1 : -1]
    actions = accumulate((len(lengths) + sum(lengths) // size) * num_ranks for size in sizes)
    return sorted(size for size, so_far in zip(sizes, actions, strict=True) if so_far <= _MOST_ACTIONS)


def _powers(least: int, most: int) -> Iterator[int]:
    """Yield the powers of two from one number to another, both included."""
    power = 1 << (least - 1).bit_length()
    while power <= most:
        yield power
        power *= 2


def _draw(path: str, plans: list[tuple[str, Plan]]) -> None:
    """Write a page or a picture of plans below each other."""
    if is_page(path):
        save_page([Shown(name, shown_plan) for name, shown_plan in plans], path)
    else:
        save_picture(side_by_side(plans), path)


def _entry(
    args: argparse.Namespace,
    lengths: tuple[int, ...],
    tokens: list[int],
    layout: Layout,
    name: str,
    kind: str,
    size: int | None = None,
) -> Entry:
    """Plan one batch with one planner.

    Args:
        layout: of one stage per rank, or as given; a planner that needs another placement has even or balanced layers at that.
        size: of its rows or chunks; None for the flags' size.
    """
    start_s = time.process_time()
    known = PLANNERS.entry(name)
    try:
        own = layout_for(name, layout)
        if own != layout and kind == BALANCED:
            own = balanced_at(args, own, lengths)
        options = options_from(args, planner=name)
        if size is not None:
            options = replace(options, context=size) if name in _IN_ROWS else replace(options, chunk_tokens=size)
        if known is not None:
            split, offload = options.split_weight or known.splits_weight, options.offload or known.offloads
            options = replace(options, split_weight=split, offload=offload)
        with latest_message(EXACT_PLANNER_LOG) as latest:
            planned, refusal = plan(problem_of(args, lengths, own.placement), costs_of(args, tokens, own), options), ""
    except EppError as error:
        planned, refusal = None, error.text(names_of(args.parser))
    note = "" if planned is None else latest()
    if size is None:
        row = args.context or round_up(max(lengths), args.token_multiple)
        size = row if name in _IN_ROWS else args.chunk_tokens
    return Entry(name, planned, refusal, (time.process_time() - start_s) * 1e3, note, kind, size, args.latents == "on")


def _ranked(entries: list[Entry], count: int) -> list[Entry]:
    """Sort the entries of each batch by makespan; those without a plan go last."""

    batches = (entries[start : start + count] for start in range(0, len(entries), count))
    return [*chain.from_iterable(sorted(batch, key=lambda entry: entry.makespan_us) for batch in batches)]


def _text(batch: str, lengths: tuple[int, ...], entries: list[Entry], titled: bool) -> str:
    lines = [f"{batch}: {len(lengths):,} sequences of up to {max(lengths):,} tokens"] if titled else []
    settings = [(entry.layers, "own" if entry.size is None else f"{entry.size:,}") for entry in entries]
    lines.append(comparison([(entry.planner, entry.plan) for entry in entries], ("layers", "size"), settings))
    lines.append("size: most tokens of a chunk or row, the fastest of those tried; own: the planner chooses, or has no limit")
    if relaying := [entry.planner for entry in entries if entry.plan is not None and entry.latents]:
        lines.append(f"latents are cached in {', '.join(relaying)}, keys and values in the others; the faster of both each")
    planned = [entry.planner for entry in entries if entry.plan is not None]
    known = {name: entry for name in planned if (entry := PLANNERS.entry(name)) is not None}
    if splits := [name for name, entry in known.items() if entry.splits_weight]:
        lines.append(f"weight gradients are split off in {', '.join(splits)}; with --split-weight in all")
    if copying := [name for name, entry in known.items() if entry.offloads]:
        lines.append(f"activations may be offloaded in {', '.join(copying)}; with --offload in all")
    if joining := [name for name, entry in known.items() if entry.joins]:
        lines.append(f"exchanges are overlapped in {', '.join(joining)}; with --overlap-exchanges in greedy")
    lines += [f"{entry.planner}: {entry.note}" for entry in entries if entry.note]
    lines += [f"{entry.planner}: no plan. {entry.refusal}" for entry in entries if entry.plan is None]
    return "\n".join(lines)


def _row(batch: str, lengths: tuple[int, ...], entries: list[Entry], entry: Entry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "batch": batch,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "planner": entry.planner,
        "planning_ms": entry.planning_ms,
        "layers": entry.layers,
        "size": entry.size,
        "latents": entry.latents,
    } | ({"note": entry.note} if entry.note else {})
    if entry.plan is None:
        return row | {"refusal": entry.refusal}
    predicted = entry.plan.predicted
    best_us = min(e.plan.predicted.makespan_us for e in entries if e.plan is not None)
    return row | {
        "makespan_us": predicted.makespan_us,
        "makespan_over_best": predicted.makespan_us / best_us,
        "lower_bound_us": predicted.lower_bound_us,
        "bubble_fraction": predicted.bubble_fraction,
        "peak_bytes": list(predicted.peak_bytes),
        "cap_bytes": list(entry.plan.cap_bytes),
        "recompute_share": recompute_share(entry.plan),
        "chunks": len(entry.plan.chunks),
    }


_PURPOSE = "plan batches with several planners and print them side by side"
COMMAND = Command("compare", _PURPOSE, add_arguments, run, _EXAMPLE, (*EVERYDAY_PROBLEM, "--planner", "--output"))
