"""The command that lists the schedules, and the layout that each of them needs."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_epp.cli.layout import Chosen
from megatron_epp.cli.terminal import Command, Parser, say
from megatron_epp.plan.layout import Layout
from megatron_epp.planner.schedules import BASELINES, SCHEDULES
from megatron_epp.report.table import table

OURS = {
    "greedy": "the default: slices of equal time, packed short sequences, the best of several orders, recompute and copies",
    "1f1b": "1F1B of whole sequences in the order of the batch, recompute as the cap requires",
    "milp": "a solver around greedy: order, recompute, weight gradients and copies of small batches",
}
"""Planners of this package, with a line each."""
SOURCES = {"milp": "OptPipe, 2510.05186"}
"""Papers that planners of this package follow."""
USUAL = tuple(sorted({*OURS, *BASELINES}))
"""Planners that take the layout as it is, which `compare` runs by default."""
ALL = "all"


def layout_for(planner: str, layout: Layout) -> Layout:
    """Return the layout with which a planner can plan: the given one, or even layers at the placement of its schedule.

    Args:
        planner: its name; of one of a user's own, the layout stays.
        layout: that of the command.

    Raises:
        EppError: there are more stages than layers, or the schedule divides them otherwise.
    """
    schedule = SCHEDULES.get(planner)
    if schedule is None or schedule.order is None:
        return layout
    placement = layout.placement
    wanted = schedule.order.layout(layout.num_layers, placement.num_ranks, placement.num_chunks)
    if wanted.placement.rank_of == placement.rank_of:
        return layout
    return replace(wanted, shards_vocabulary=layout.shards_vocabulary and not wanted.has_separate_attention)


def chosen_for(planner: str, chosen: Chosen) -> Chosen:
    """Return the layout of a command for a planner, see `layout_for`: without the search's figures where it is another."""
    layout = layout_for(planner, chosen.layout)
    return chosen if layout == chosen.layout else Chosen(layout)


def add_arguments(parser: Parser) -> None:
    """Add the command's flags, of which it has none."""
    del parser


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    del args
    rows = [[name, "any", "", SOURCES.get(name, "this package"), summary] for name, summary in OURS.items()]
    for name, schedule in SCHEDULES.items():
        count = 1 if schedule.order is None else schedule.order.chunks_per_rank
        kind = "looped" if schedule.order is None else schedule.order.kind
        stages = f"{'2 or more' if count is None else count}{', V' * (kind == 'v')}" if kind != "helix" else "one per layer"
        uses = ["W"] * schedule.splits_weight + ["offload"] * schedule.offloads
        summary = schedule.summary + "; planned, not run" * bool(schedule.lacks)
        rows.append([name, stages, ", ".join(uses), schedule.source, summary])
    say("\n".join(table(("planner", "stages per rank", "uses", "source", "what it does"), rows, left=range(5))))
    for name, schedule in SCHEDULES.items():
        if schedule.lacks:
            say(f"\n{name} is planned, not run: training lacks {schedule.lacks}.")
    say("\n`megatron-epp compare --planner NAME` (several, or all) compares them for your batch, model and cap.")
    return 0


COMMAND = Command("schedules", "list the schedules and planners that plans can follow, with their papers", add_arguments, run)
