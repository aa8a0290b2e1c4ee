"""The command that sets planners side by side, over one batch or several."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.cli.inputs import add_problem, costs_of, problem_of, tell_sharing
from megatron_epp.cli.layout import chosen_layout
from megatron_epp.cli.lengths import batches_of
from megatron_epp.cli.schedules import ALL, USUAL, layout_for
from megatron_epp.cli.terminal import (
    EXACT,
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
from megatron_epp.planner.schedules import SCHEDULES
from megatron_epp.report.facts import recompute_share
from megatron_epp.report.gantt import save_picture, side_by_side
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.text import comparison


@dataclass(frozen=True, slots=True)
class Entry:
    """Result of one planner for one batch.

    Attributes:
        planner: its name.
        plan: None where there is none.
        refusal: why there is none.
        planning_ms: processor time.
        note: what the exact planner says of its plan.
    """

    planner: str
    plan: Plan | None
    refusal: str
    planning_ms: float
    note: str = ""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add_problem(parser, several_batches=True)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON, a row per batch and planner")
    parser.add_argument(
        "--planner",
        action="append",
        type=lambda text: text if text == ALL else planner(text),
        metavar="NAME",
        help=f"a planner to compare, {PLANNER_NAMES}; repeat it for more. {ALL}: every one, fastest first, those of other "
        f"placements with even layers on their own (default: {', '.join(USUAL)})",
    )
    below = "the plans of one batch below each other, .html to explore, .png, .svg or .pdf as a picture (default: none)"
    add_output(parser, below, type=picture_or_page)


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Raises `EppError`."""
    say(compare(args))
    return 0


def compare(args: argparse.Namespace) -> str:
    """The table of all batches and planners, as text or with ``--json`` as JSON; ``--output`` draws those of one batch.

    Raises:
        EppError: the arguments make no sense, or matplotlib is missing.
    """
    batches = batches_of(args)
    if args.output and len(batches) > 1:
        raise EppError(f"-o draws the plans of one batch, there are {len(batches)}: give --lengths once")
    names = list(dict.fromkeys(sorted(PLANNERS) if ALL in (args.planner or ()) else args.planner or USUAL))
    chosen = chosen_layout(args, [lengths for _, lengths in batches], names)
    tell_sharing(args)
    tokens = [length for _, lengths in batches for length in lengths]
    total, tables = len(names) * len(batches), []
    made: list[Entry] = []
    with progress("planning", lambda: f"{len(made)} of {total} plans"):
        for _, lengths in batches:
            for name in names:
                made.append(_entry(args, lengths, tokens, chosen.layout, name))
    if ALL in (args.planner or ()):
        made = _ranked(made, len(names))
    if args.output:
        _draw(args.output, [(one.planner, one.plan) for one in made if one.plan is not None])
    for number, (name, lengths) in enumerate(batches):
        tables.append((name, lengths, made[number * len(names) : (number + 1) * len(names)]))
    if args.json:
        return json.dumps([_row(*table, entry) for table in tables for entry in table[2]], indent=1)
    texts = [_text(*table, titled=len(tables) > 1) for table in tables]
    lines = chosen.lines()
    return "\n\n".join(texts + ["\n".join(lines)] * bool(lines))


def _draw(path: str, plans: list[tuple[str, Plan]]) -> None:
    """Write a page or a picture of plans below each other."""
    if is_page(path):
        save_page([Shown(name, made) for name, made in plans], path)
    else:
        save_picture(side_by_side(plans), path)


def _entry(args: argparse.Namespace, lengths: tuple[int, ...], tokens: list[int], layout: Layout, name: str) -> Entry:
    """Plan one batch with one planner.

    Args:
        args: parsed flags.
        lengths: of the batch.
        tokens: of the sequences of all batches.
        layout: of the command; a planner that needs another placement has even layers at that.
        name: of the planner.
    """
    start_s = time.process_time()
    schedule = SCHEDULES.get(name)
    try:
        own = layout_for(name, layout)
        options = options_from(args, planner=name)
        if schedule is not None:
            split, offload = options.split_weight or schedule.splits_weight, options.offload or schedule.offloads
            options = replace(options, split_weight=split, offload=offload)
        with latest_message(EXACT) as latest:
            made, refusal = plan(problem_of(args, lengths, own.placement), costs_of(args, tokens, own), options), ""
    except EppError as error:
        made, refusal = None, error.text(names_of(args.parser))
    note = "" if made is None else latest()
    return Entry(name, made, refusal, (time.process_time() - start_s) * 1e3, note)


def _ranked(made: list[Entry], count: int) -> list[Entry]:
    """Sort the entries of each batch by makespan; those without a plan go last."""

    def key(entry: Entry) -> float:
        return math.inf if entry.plan is None else entry.plan.predicted.makespan_us

    return [entry for start in range(0, len(made), count) for entry in sorted(made[start : start + count], key=key)]


def _text(batch: str, lengths: tuple[int, ...], entries: list[Entry], titled: bool) -> str:
    lines = [f"{batch}: {len(lengths):,} sequences of up to {max(lengths):,} tokens"] if titled else []
    lines.append(comparison([(entry.planner, entry.plan) for entry in entries]))
    planned = [entry.planner for entry in entries if entry.plan is not None]
    theirs = {name: SCHEDULES[name] for name in planned if name in SCHEDULES}
    if splits := [name for name, schedule in theirs.items() if schedule.splits_weight]:
        lines.append(f"weight gradients are split off in {', '.join(splits)}; with --split-weight in all")
    if copying := [name for name, schedule in theirs.items() if schedule.offloads]:
        lines.append(f"activations may be offloaded in {', '.join(copying)}; with --offload in all")
    if joining := [name for name, schedule in theirs.items() if schedule.joins]:
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


COMMAND = Command("compare", "plan batches with several planners and print them side by side", add_arguments, run)
