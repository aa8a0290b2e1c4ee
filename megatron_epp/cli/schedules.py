"""The command that lists the schedules, and the layout that each of them needs."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_epp.cli.layout import Chosen
from megatron_epp.cli.terminal import Command, Parser, say
from megatron_epp.plan.layout import Layout
from megatron_epp.planner.registry import PLANNERS, PlannerEntry
from megatron_epp.report.table import table

ALL = "all"


def layout_for(planner: str, layout: Layout) -> Layout:
    """Return the layout with which a planner can plan: the given one, or even layers at the placement of its schedule.

    Args:
        planner: its name; of one of a user's own, the layout stays.
        layout: that of the command.

    Raises:
        EppError: there are more stages than layers, or the schedule divides them otherwise.
    """
    entry = PLANNERS.entry(planner)
    if entry is None or entry.fixed is None:
        return layout
    placement = layout.placement
    wanted = entry.fixed.layout(layout.num_layers, placement.num_ranks, placement.num_chunks)
    if wanted.placement.rank_of == placement.rank_of:
        return layout
    return replace(wanted, shards_vocabulary=layout.shards_vocabulary and wanted.is_movable)


def usual() -> list[str]:
    """Return the planners that `compare` runs by default: those that take the layout as it is, and whose plans run."""
    return sorted(name for name, entry in PLANNERS.entries().items() if entry.fixed is None and not entry.lacks)


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
    entries, rows = PLANNERS.entries(), []
    for name, entry in entries.items():
        uses = ["W"] * entry.splits_weight + ["offload"] * entry.offloads
        summary = entry.summary + "; planned, not run" * bool(entry.lacks)
        rows.append([name, _stages(entry), ", ".join(uses), entry.source, summary])
    say("\n".join(table(("planner", "stages per rank", "uses", "source", "what it does"), rows, left=range(5))))
    for name, entry in entries.items():
        if entry.lacks:
            say(f"\n{name} is planned, not run: training lacks {entry.lacks}.")
    say("\n`megatron-epp compare --planner NAME` (several, or all) compares them for your batch, model and cap.")
    return 0


def _stages(entry: PlannerEntry) -> str:
    """Say how many stages of a rank a planner plans for."""
    if entry.fixed is None:
        return "any" if entry.begins_with_greedy else "1"
    return entry.fixed.stages


COMMAND = Command("schedules", "list the schedules and planners that plans can follow, with their papers", add_arguments, run)
