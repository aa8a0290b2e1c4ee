"""The table of planners, and the layout that each of them needs."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace

from megatron_epp.plan.layout import Layout
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.problem import Lengths
from megatron_epp.tools.cli.layout_flag import BALANCED, Chosen, chosen_layout
from megatron_epp.tools.cli.planning_flags import costs_source
from megatron_epp.tools.cli.terminal import Parser, help_width, say
from megatron_epp.tools.formulas import Profile
from megatron_epp.tools.formulas.library import balanced_layers
from megatron_epp.tools.report.text import table

ALL = "all"
EXAMPLE = ""
_LEGEND = """\
stages: on one rank; V: in a V, the first and the last stage on one rank
uses: W, gradients of weights as actions of their own; offload, copies to host memory"""
_COMPARE = "`megatron-epp compare --planner NAME` (several, or all) compares them for your batch, model and cap."


def usual() -> list[str]:
    """Return the planners that `compare` runs by default: they take the layout as it is, and their plans run with any flags."""
    return sorted(name for name, own in PLANNERS.entries().items() if own.fixed is None and not (own.lacks or own.problems))


def layout_at(args: argparse.Namespace, chosen: Chosen, planner: str, batch: Lengths) -> Layout:
    """Return a planner's layout: the chosen one, or layers at its placement, balanced if the chosen are. Raises `EppError`."""
    entry, layout, placement = PLANNERS.entry(planner), chosen.layout, chosen.layout.placement
    if entry is None or entry.fixed is None:
        return layout
    fixed = entry.fixed.layout(layout.num_layers, placement.num_ranks, placement.num_chunks)
    ranks, shards = fixed.placement.rank_of, layout.shards_vocabulary and fixed.is_movable
    if ranks == placement.rank_of:
        return layout
    if fixed.is_movable and (chosen.kind == BALANCED or chosen.choice is not None):
        source, num_layers = costs_source(args, max(batch.lengths))
        if isinstance(source, Profile):
            layers = balanced_layers(source, num_layers, len(ranks), [batch], ranks, shards_vocabulary=shards)
            return Layout(layers, fixed.placement, shards_vocabulary=shards)
    return replace(fixed, shards_vocabulary=shards)


def chosen_for(args: argparse.Namespace, batch: Lengths) -> Chosen:
    """Return a command's layout for its planner, without the search's figures if it is another layout."""
    chosen = chosen_layout(args, [batch])
    layout = layout_at(args, chosen, args.planner, batch)
    return chosen if layout == chosen.layout else replace(chosen, layout=layout, choice=None)


def add_arguments(parser: Parser) -> None:
    """Add no flags."""


def run(_: argparse.Namespace) -> int:
    entries, rows = PLANNERS.entries(), []
    for name, entry in entries.items():
        stages = "any" if entry.begins_with_greedy else "any, looped" if entry.interleaves else "1"
        uses = ["W"] * entry.splits_weight + ["offload"] * entry.offloads
        summary = f"{entry.summary} ({entry.source})" + "; planned, not run" * bool(entry.lacks)
        rows.append([name, stages if entry.fixed is None else entry.fixed.stages, ", ".join(uses), summary])
    lines = table(("planner", "stages", "uses", "what it does"), rows, left=range(4))
    below = " " * lines[0].index("what it does")
    wrapped = [row for line in lines for row in textwrap.wrap(line, help_width() - 2, subsequent_indent=below)]
    lacking = [f"{name} is planned, not run: training lacks {entry.lacks}." for name, entry in entries.items() if entry.lacks]
    say("\n".join([*wrapped, "", _LEGEND, "", *lacking, "", _COMPARE]))
    return 0
