"""Measurement of layouts, on paper: even, balanced, levelled in half layers, and searched, for the same batches; the last also
with the vocabulary divided over the ranks where that pays.

    python -m scripts.bench.layouts                 all cases: three models, 4 to 16 ranks, caps of 40 to 141 GB
    python -m scripts.bench.layouts --reduced       two of them

Layouts are chosen for other batches of the run, and each plans the case's own batch with the same planner, costs and cap.
Efficiency is computation without recompute, divided evenly over the ranks, as a share of the makespan. The bound is that of the
plan's own chunks and layers, the recompute that the cap forces included. All makespans are the simulator's, and costs are
analytic.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any

from megatron_epp.cost import PipelineCosts, Profile, analytic_profile
from megatron_epp.cost.library import balanced_layers, load_cluster
from megatron_epp.cost.output_layer import PASS_US
from megatron_epp.plan import Op, Plan, Step
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.layouts.layout_choice import Sample, choose
from megatron_epp.planner.layouts.rank_work import HALF, LayerWork
from scripts.bench.frame import Bench, Figures, geometric_mean
from scripts.bench.planner.suite import CLUSTER, OTHER_BATCHES, REPLICAS, Case, fitting
from scripts.tables import table

MODELS, RANKS, CAPS_GB = ("llama3-8b", "llama2-13b", "llama3-70b"), (4, 8, 16), (40, 80, 141)
KINDS, CONTEXTS = ("wikipedia", "code", "agents"), (32768, 131072, 196608)
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

    def planned(self, layout: Layout) -> Plan | None:
        problem: Problem = replace(self.problem, placement=layout.placement.rank_of)
        return fitting(problem, self.costs_of(layout), self.options)


def row(args: Namespace, run: Run) -> Figures:
    """Return all figures of one run."""
    layouts = {name: run.layout(name) for name in LAYOUTS}
    return {"layouts": {name: _figures(layout, run.planned(layout)) for name, layout in layouts.items()}}


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


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format efficiencies over the runs in which every layout has a plan."""
    planned = [r["layouts"] for r in rows if all(own["makespan_us"] for own in r["layouts"].values())]
    if not planned:
        return "no run has a plan with every layout"
    cells = []
    for name in LAYOUTS:
        each = [layouts[name] for layouts in planned]
        shares = [pick(own[key] for own in each) for key in ("efficiency", "best_efficiency") for pick in (median, min)]
        over = geometric_mean([layouts[name]["makespan_us"] / layouts["auto"]["makespan_us"] for layouts in planned])
        cells.append([name, *(f"{share:.3f}" for share in shares), f"{over:.3f}"])
    titles = ["layout", "efficiency, median", "least", "of the bound, median", "least", "makespan / auto's"]
    lines = [table(titles, cells), f"{len(planned)} of {len(rows)} runs have a plan with every layout"]
    return "\n".join(lines)


def cases(args: Namespace) -> dict[str, Run]:
    """Return a run for every model, number of ranks and cap; kinds of lengths and contexts take turns."""
    sizes = enumerate(product(MODELS, RANKS, CAPS_GB))
    runs = [Run(KINDS[at % 3], CONTEXTS[(at // 3 + at // 9) % 3], ranks, model, cap_gb) for at, (model, ranks, cap_gb) in sizes]
    if args.reduced:
        runs = [run for run in runs if run.stages == 4 and run.cap_gb == 80][:2]
    return {f"{run.lengths_like} {run.context} {run.model} {run.stages} {run.cap_gb}": run for run in runs}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    reduced="two runs on 4 ranks",
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
