"""Measurement of layouts, on paper: even, balanced, levelled in half layers, and searched, for the same batches; the last also
with the vocabulary divided over the ranks where that pays.

    python -m scripts.bench.layouts                 all cases: three models, 4 to 16 ranks, caps of 40 to 141 GB
    python -m scripts.bench.layouts --reduced       two of them
    python -m scripts.bench.layouts --first 20 --layouts even,balanced,halves,auto --rivals ''
                                                    the first 20 cases, without the vocabulary over all ranks

Layouts are chosen for other batches of the run, and each plans the case's own batch with the same planner, costs and cap.
Efficiency is computation without recompute, divided evenly over the ranks, as a share of the makespan. The bound is that of the
plan's own chunks and layers, the recompute that the cap forces included. The other planners plan with balanced layers, which is
the best that they know. All makespans are the simulator's, and costs are analytic.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_epp.cost import PipelineCosts, Profile, analytic_profile
from megatron_epp.cost.library import balanced_layers, load_cluster
from megatron_epp.cost.output_layer import PASS_US
from megatron_epp.plan import InfeasibleError, Op, Plan, Step
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.layouts.layout_choice import Sample, choose
from megatron_epp.planner.layouts.rank_work import HALF, LayerWork
from scripts.bench.planner.report import table
from scripts.bench.planner.suite import CLUSTER, OTHER_BATCHES, REPLICAS, Case

MODELS, RANKS, CAPS_GB = ("llama3-8b", "llama2-13b", "llama3-70b"), (4, 8, 16), (40, 80, 141)
KINDS, CONTEXTS = ("wikipedia", "code", "chat"), (32768, 131072, 196608)
RIVALS = ("infinipipe", "seq1f1b")
LAYOUTS = ("even", "balanced", "halves", "auto", "vocabulary")
"""The last is searched like the one before, with the output layer on the last stage or in shards over all ranks."""


@dataclass(frozen=True)
class Run(Case):
    """A batch on a pipeline, and other batches of the same run, for which the layout is chosen."""

    @property
    def longest(self) -> int:
        """The pipeline has room for the longest sequence of all batches."""
        return max(*self.lengths, *self.other_lengths)

    @cached_property
    def profile(self) -> Profile:
        return analytic_profile(self.shape, load_cluster(CLUSTER).rates)

    @cached_property
    def options(self) -> Options:
        return Options(context=self.context)

    @cached_property
    def sample(self) -> Sample:
        others = (self._batch(self.seed + 10_000 * batch) for batch in range(1, OTHER_BATCHES + 1))
        problems = tuple(replace(self.problem, lengths=lengths) for lengths in others)
        return Sample(problems, self.costs_of, self.shape.num_layers, self.options)

    def costs_of(self, layout: Layout) -> PipelineCosts:
        shares = layout.vocabulary_shares
        return self.profile.costs(layout.layers, state_bytes_per_parameter=6 + 12 / REPLICAS, vocabulary_shares=shares)

    def layout(self, name: str) -> Layout:
        """The layout of a name in `LAYOUTS`, chosen for the other batches."""
        num_layers, one_each = self.shape.num_layers, Placement("looped", self.stages, 1)
        if name == "even":
            return self.sample.even
        if name == "balanced":
            return Layout.of_layers(balanced_layers(self.profile, num_layers, self.stages, self.other_lengths), one_each)
        if name == "halves":
            return LayerWork.of(self.sample.problems, self.costs_of, halves=True).spread(num_layers, one_each, HALF)
        either = (False, True) if name == "vocabulary" else (False,)
        return choose(replace(self.sample, vocabulary=either)).layout

    def planned(self, layout: Layout, planner: str = "greedy") -> Plan | None:
        problem: Problem = replace(self.problem, placement=layout.placement.rank_of)
        try:
            return plan(problem, self.costs_of(layout), replace(self.options, planner=planner))
        except InfeasibleError:
            return None


def all_runs() -> list[Run]:
    """A run for every model, number of ranks and cap; kinds of lengths and contexts take turns."""
    sizes = enumerate(product(MODELS, RANKS, CAPS_GB))
    return [Run(KINDS[at % 3], CONTEXTS[(at // 3 + at // 9) % 3], ranks, model, cap_gb) for at, (model, ranks, cap_gb) in sizes]


def row(run: Run, rivals: Sequence[str], names: Sequence[str] = LAYOUTS) -> dict[str, Any]:
    """All figures of one run with some layouts, `auto` among them."""
    figures: dict[str, Any] = {
        "lengths": run.lengths_like,
        "context": run.context,
        "ranks": run.stages,
        "model": run.model,
        "cap_gb": run.cap_gb,
    }
    layouts: dict[str, Any] = {}
    for name in names:
        start_s = time.process_time()
        layout = run.layout(name)
        took_s = time.process_time() - start_s
        layouts[name] = _figures(layout, run.planned(layout)) | {"choosing_s": took_s}
    balanced = run.layout("balanced")
    plans = {name: run.planned(balanced, name) for name in rivals}
    theirs = {name: None if plan is None else plan.predicted.makespan_us for name, plan in plans.items()}
    return figures | {"layouts": layouts, "rivals": theirs}


def _figures(layout: Layout, plan: Plan | None) -> dict[str, Any]:
    where = {
        "layers": layout.layers,
        "placement": layout.placement.kind,
        "stages_per_rank": layout.placement.num_chunks,
        "shards_vocabulary": layout.shards_vocabulary,
    }
    if plan is None:
        return where | {"makespan_us": None}
    busy_us = sum(_needed_us(step) for steps in plan.ranks for step in steps) - sum(map(sum, plan.recompute_us))
    makespan_us, bound_us = plan.predicted.makespan_us, plan.predicted.lower_bound_us
    return where | {
        "makespan_us": makespan_us,
        "bound_us": bound_us,
        "efficiency": busy_us / plan.num_ranks / makespan_us,
        "best_efficiency": busy_us / plan.num_ranks / bound_us,
    }


def _needed_us(step: Step) -> float:
    """Time of a step without the fixed part that the shards of the vocabulary add."""
    return step.time_us - PASS_US * (step.action.op in (Op.S, Op.N, Op.T))


def summary(rows: Sequence[dict[str, Any]], rivals: Sequence[str]) -> dict[str, Any]:
    """Figures over the runs in which every layout has a plan; ratios where the other planner has one too."""
    all_planned = [r for r in rows if all(figures["makespan_us"] for figures in r["layouts"].values())]
    if not all_planned:
        return {"runs": len(rows), "planned": 0}
    of: dict[str, Any] = {}
    for name in all_planned[0]["layouts"]:
        each = [r["layouts"][name] for r in all_planned]
        of[name] = {key: [median(e[key] for e in each), min(e[key] for e in each)] for key in ("efficiency", "best_efficiency")}
    autos = [r["layouts"]["auto"]["makespan_us"] for r in all_planned]
    gaps = [
        auto / min(e["bound_us"] for e in r["layouts"].values() if not e["shards_vocabulary"]) - 1
        for auto, r in zip(autos, all_planned, strict=True)
    ]
    sharded = [r["layouts"]["vocabulary"] for r in all_planned if "vocabulary" in of]
    gaps_of_sharded = [figures["makespan_us"] / figures["bound_us"] - 1 for figures in sharded]
    took_s = {name: [r["layouts"][name]["choosing_s"] for r in rows] for name in ("auto", "vocabulary") if name in of}
    over = {name: [r["layouts"][name]["makespan_us"] / auto for auto, r in zip(autos, all_planned, strict=True)] for name in of}
    theirs = {
        name: {
            own: _mean([r["rivals"][name] / us for r in rows if r["rivals"][name] and (us := r["layouts"][own]["makespan_us"])])
            for own in took_s
        }
        for name in rivals
    }
    return {
        "runs": len(rows),
        "planned": len(all_planned),
        "layouts": of,
        "gap_to_best_bound": [median(gaps), max(gaps)],
        "over_auto": {name: _mean(ratios) for name, ratios in over.items()},
        "vocabulary_gap": [pick(gaps_of_sharded) for pick in (median, max)] if sharded else [],
        "vocabulary_in_shards": sum(figures["shards_vocabulary"] for figures in sharded),
        "rivals_over": theirs,
        "choosing_s": {name: [median(times), max(times)] for name, times in took_s.items()},
    }


def _mean(ratios: Sequence[float]) -> float | None:
    """Geometric mean."""
    return exp(fmean(map(log, ratios))) if ratios else None


def markdown(totals: dict[str, Any], rivals: Sequence[str]) -> str:
    """Format the summary as a table, and lines under it."""
    if not totals["planned"]:
        return "no run has a plan with every layout"
    rows = []
    for name, figures in totals["layouts"].items():
        shares = [f"{value:.3f}" for key in ("efficiency", "best_efficiency") for value in figures[key]]
        rows.append([name, *shares, f"{totals['over_auto'][name]:.3f}"])
    lines = [
        table(["layout", "efficiency, median", "least", "of the bound, median", "least", "makespan / auto's"], rows),
        f"{totals['planned']} of {totals['runs']} runs have a plan with every layout",
        "plans of auto above the least bound of all layouts: median {:.1%}, most {:.1%}".format(*totals["gap_to_best_bound"]),
    ]
    if totals["vocabulary_gap"]:
        lines.append(
            "with the vocabulary in shards ({} runs): above the bound of its own layout, median {:.1%}, most {:.1%}".format(
                totals["vocabulary_in_shards"], *totals["vocabulary_gap"]
            )
        )
    for name, own in product(rivals, totals["choosing_s"]):
        ratio = totals["rivals_over"][name][own]
        lines.append(f"{name} with balanced layers over {own}: " + ("no plan" if ratio is None else f"{ratio:.3f}"))
    for name, (usual_s, most_s) in totals["choosing_s"].items():
        lines.append(f"choosing {name} takes {usual_s:.1f} s of one core at the median and {most_s:.1f} s at most")
    return "\n".join(lines)


def line(figures: dict[str, Any]) -> str:
    """Format one run: efficiency of each layout, with that of its bound in brackets."""
    where = " ".join(f"{figures[key]}" for key in ("lengths", "context", "model", "ranks", "cap_gb"))
    cells = [
        f"{name} no plan" if own["makespan_us"] is None else f"{name} {own['efficiency']:.3f} ({own['best_efficiency']:.3f})"
        for name, own in figures["layouts"].items()
    ]
    auto_us = figures["layouts"]["auto"]["makespan_us"]
    ratios = [f"{name} {us / auto_us:.2f}" if us and auto_us else f"{name} -" for name, us in figures["rivals"].items()]
    return f"{where}: " + ", ".join([*cells, *ratios])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.layouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reduced", action="store_true", help="two runs on 4 ranks, without InfiniPipe's planner")
    parser.add_argument("--rivals", default=",".join(RIVALS), help="other planners (default: %(default)s)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="layouts, auto among them (default: %(default)s)")
    parser.add_argument("--first", type=int, metavar="N", help="only the first N runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    runs = [run for run in all_runs() if run.stages == 4 and run.cap_gb == 80][:2] if args.reduced else all_runs()
    rivals = tuple(name for name in args.rivals.split(",") if name and not (args.reduced and name == "infinipipe"))
    names = args.layouts.split(",")
    if "auto" not in names or not set(names) <= set(LAYOUTS):
        parser.error(f"--layouts takes auto and any of {', '.join(LAYOUTS)}")
    rows = []
    for run in runs[: args.first]:
        rows.append(row(run, rivals, names))
        print(line(rows[-1]), flush=True)
        totals = summary(rows, rivals)
        if args.json is not None:
            args.json.write_text(json.dumps({"summary": totals, "rows": rows}, indent=1) + "\n")
    print("\n" + markdown(totals, rivals))
    return 0
