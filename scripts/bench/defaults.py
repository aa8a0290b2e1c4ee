"""Measurement of what `--epp` alone chooses, on paper: against even layers, and against the best of all flags in hindsight.

    python -m scripts.bench.defaults                        all cases: six models, 4 to 16 ranks, caps of 40 to 141 GB
    python -m scripts.bench.defaults --only qwen3           some of them
    python -m scripts.bench.defaults --json runs/defaults.json --only qwen3     and keep what other calls have written there

The defaults (`megatron_epp.tools.layouts.layout_choice.settle`) see eight other batches of the run, as in a training, and are
judged by the plan of the case's own batch. The best of flags is the least makespan that any would have had for it: every
placement, the output layer on the last stage or over all ranks, whole backwards or split weight gradients, with layers
searched for the batch itself, with even layers, and with those of the defaults. Efficiency is computation without recompute,
divided evenly over the ranks, as a share of the makespan. All makespans are the simulator's, and costs are analytic.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.output_layer import PASS_US
from megatron_epp.plan import InfeasibleError, Op, Plan
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement, placements_of
from megatron_epp.plan.problem import Lengths, Options, Problem
from megatron_epp.tools.formulas import Profile, analytic_profile
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster
from megatron_epp.tools.layouts.layout_choice import MIN_GAIN_OF_SEVERAL_SHARE, Sample, choose, settle
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.suite import CLUSTER, OTHER_BATCHES, REPLICAS, Case, fitting
from scripts.tables import table

CLOSE_SHARE, LEAST_EFFICIENCY = 0.015, 0.88
"""A run whose defaults are slower than the best of flags by more than this share, or less efficient, has a line of causes."""


@dataclass(frozen=True)
class Run(Case):
    """A batch on a pipeline, and other batches of the same run, for which the defaults are chosen."""

    expert_ranks: int = 1
    sequences: int = 64

    @property
    def flags(self) -> dict[str, Any]:
        return super().flags | ({"expert_model_parallel_size": self.expert_ranks} if self.expert_ranks > 1 else {})

    @property
    def longest(self) -> int:
        """The pipeline has room for the longest sequence of all batches."""
        return max(*self.lengths, *self.other_lengths)

    @cached_property
    def profile(self) -> Profile:
        return analytic_profile(self.shape, load_cluster(CLUSTER).rates)

    @cached_property
    def sample(self) -> Sample:
        """The first batches of the run, and all that a training may choose."""
        others = (self._batch(self.seed + 10_000 * batch) for batch in range(1, OTHER_BATCHES + 1))
        return Sample(
            problems=tuple(replace(self.problem, lengths=lengths) for lengths in others),
            costs_of=self.costs_of,
            num_layers=self.shape.num_layers,
            options=Options(context=self.context),
            placements=tuple(each for each in placements_of(self.stages) if each.num_stages <= self.shape.num_layers),
            vocabulary=(False, True),
        )

    def costs_of(self, layout: Layout) -> PipelineCosts:
        shares = layout.vocabulary_shares
        return self.profile.costs(layout.layers, state_bytes_per_parameter=6 + 12 / REPLICAS, vocabulary_shares=shares)

    @property
    def balanced(self) -> Layout:
        layers = balanced_layers(self.profile, self.shape.num_layers, self.stages, [Lengths(self.other_lengths)])
        return Layout(layers, Placement("looped", self.stages, 1))

    def planned(self, layout: Layout, *, splits_weight: bool = False) -> Plan | None:
        problem: Problem = replace(self.problem, placement=layout.placement.rank_of)
        return fitting(problem, self.costs_of(layout), replace(self.sample.options, split_weight=splits_weight))

    def hindsight(self) -> Iterator[Layout]:
        """Yield the layouts searched for the case's own batch, for each setting of the flags."""
        own = replace(self.sample, problems=(self.problem,))
        for placement, shards in product(self.sample.placements, self.sample.vocabulary):
            with suppress(InfeasibleError):
                yield choose(replace(own, placements=(placement,), vocabulary=(shards,))).layout


def row(args: Namespace, run: Run) -> Figures:
    """Return all figures of one run: of every setting, and why the defaults are slower than the best of flags."""
    tensor_ranks, even = run.shape.tensor_parallel, run.sample.even
    _, chosen = settle(run.sample, tensor_ranks=tensor_ranks)
    figures: Figures = {
        "defaults": _figures(run, chosen.layout, splits_weight=chosen.splits_weights),
        "even": _figures(run, even, splits_weight=False),
        "balanced": _figures(run, run.balanced, splits_weight=False),
    }
    layouts = dict.fromkeys((*run.hindsight(), chosen.layout, even))
    every = [_figures(run, layout, splits_weight=splits) for layout, splits in product(layouts, (False, True))]
    best = min((each for each in every if each["makespan_us"]), key=lambda each: each["makespan_us"])
    figures |= {"best": best, "every": every, "tokens": sum(run.lengths), "tensor": tensor_ranks}
    if 1 - ratio(figures) > CLOSE_SHARE:
        _, known = settle(replace(run.sample, problems=(run.problem,)), tensor_ranks=tensor_ranks)
        figures["own batch"] = _figures(run, known.layout, splits_weight=known.splits_weights)
    return figures


def _figures(run: Run, layout: Layout, *, splits_weight: bool) -> dict[str, Any]:
    where = {
        "layers": layout.layers,
        "placement": layout.placement.kind,
        "stages_per_rank": layout.placement.num_chunks,
        "shards_vocabulary": layout.shards_vocabulary,
        "splits_weight": splits_weight,
    }
    plan = run.planned(layout, splits_weight=splits_weight)
    if plan is None:
        return where | {"makespan_us": None}
    recompute_us, makespan_us = sum(map(sum, plan.recompute_us)), plan.predicted.makespan_us
    times_us = (step.time_us - PASS_US * (step.action.op in (Op.S, Op.N, Op.T)) for steps in plan.ranks for step in steps)
    busy_us = sum(times_us) - recompute_us  # without the fixed part that the shards of the vocabulary add
    all_us = plan.num_ranks * makespan_us
    return where | {
        "makespan_us": makespan_us,
        "bound_us": plan.predicted.lower_bound_us,
        "efficiency": busy_us / all_us,
        "recompute_share": recompute_us / all_us,
    }


def ratio(row: Figures) -> float:
    """Return the best makespan of flags as a share of that of the defaults."""
    return float(row["best"]["makespan_us"] / row["defaults"]["makespan_us"])


def cause(row: Figures) -> str:
    """Say why the defaults miss a goal in a run; empty if they do not."""
    defaults, best, words = row["defaults"], row["best"], []
    if 1 - ratio(row) > CLOSE_SHARE:
        one_stage = defaults["stages_per_rank"] == 1 < best["stages_per_rank"]
        whole = row["tensor"] > 1 and best["splits_weight"] > defaults["splits_weight"]
        planned = [each for each in row["every"] if each["makespan_us"]]
        plain = [each for each in planned if each["stages_per_rank"] == 1] if one_stage else planned
        plain_us = min(each["makespan_us"] for each in plain)
        whole_us = min(each["makespan_us"] for each in plain if not (whole and each["splits_weight"]))
        saved = {
            "several stages on a rank": 1 - best["makespan_us"] / plain_us,
            "split weight gradients": 1 - plain_us / whole_us,
        }
        limit_us = defaults["makespan_us"] * (1 - CLOSE_SHARE)
        is_close = max(saved.values()) <= MIN_GAIN_OF_SEVERAL_SHARE
        if is_close and limit_us <= whole_us:
            words.append("caution: " + ", ".join(f"{what} save {share:.1%}" for what, share in saved.items() if share > 0))
        elif row["own batch"]["makespan_us"] * (1 - CLOSE_SHARE) <= best["makespan_us"]:
            words.append("batches differ: chosen for this one, the defaults are as fast")
        elif min(each["makespan_us"] for each in planned if not each["splits_weight"]) >= limit_us:
            words.append("the choice: layouts are compared with whole backwards, and with split ones another is faster")
        else:
            words.append("the choice: it is slower for this batch itself, too")
        words[-1] += f" (best: {_text(best)})"
    if defaults["efficiency"] < LEAST_EFFICIENCY:
        idle = 1 - defaults["efficiency"] - defaults["recompute_share"]
        words.append(
            f"recompute {defaults['recompute_share']:.1%}, waiting {idle:.1%} of the time; makespan "
            f"{defaults['makespan_us'] / defaults['bound_us'] - 1:.1%} above the bound of its chunks"
        )
    return "; ".join(words)


def _text(own: dict[str, Any]) -> str:
    several = f"{own['stages_per_rank']} {own['placement']}" if own["stages_per_rank"] > 1 else "1"
    return several + ", vocabulary" * own["shards_vocabulary"] + ", W" * own["splits_weight"]


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format efficiencies by run, medians and worst, and a line for each run that misses a goal."""
    names = "even", "balanced", "defaults", "best"
    titles = ["run", *names, "best / defaults", "the defaults: stages on a rank", "the best"]
    cells = [
        [row["case"], *(_share(row[name]) for name in names), f"{ratio(row):.3f}", _text(row["defaults"]), _text(row["best"])]
        for row in rows
    ]
    for word, pick in (("median", median), ("worst", min)):
        shares = ([own["efficiency"] for row in rows if (own := row[name])["makespan_us"]] for name in names)
        cells.append(
            [word, *(f"{pick(each):.3f}" if each else "-" for each in shares), f"{pick(map(ratio, rows)):.3f}", "", ""]
        )
    lines = [table(titles, cells)]
    lines += [f"cause, {row['case']}: {why}" for row in rows if (why := cause(row))]
    return "\n".join(lines)


def _share(own: dict[str, Any]) -> str:
    return f"{own['efficiency']:.3f}" if own["makespan_us"] else "no plan"


RUNS = (
    Run("wikipedia", 32768, 4, "llama3-8b", 40),
    Run("code", 32768, 4, "llama3-8b", 80),
    Run("agents", 131072, 4, "llama3-8b", 141),
    Run("chat", 32768, 8, "llama3-8b", 40),
    Run("code", 131072, 8, "llama3-8b", 80),
    Run("agents", 131072, 8, "llama3-8b", 40),
    Run("code", 131072, 16, "llama3-8b", 80),
    Run("agents", 196608, 16, "llama3-8b", 40),
    Run("code", 32768, 4, "llama2-13b", 40),
    Run("agents", 32768, 8, "llama2-13b", 80),
    Run("wikipedia", 131072, 8, "llama2-13b", 141),
    Run("code", 196608, 16, "llama2-13b", 40),
    Run("chat", 32768, 4, "llama3-70b", 80),
    Run("code", 131072, 8, "llama3-70b", 80),
    Run("agents", 131072, 8, "llama3-70b", 141),
    Run("code", 32768, 4, "qwen3-8b", 80),
    Run("chat", 32768, 4, "qwen3-8b", 40),
    Run("agents", 131072, 8, "qwen3-8b", 80),
    Run("code", 32768, 8, "qwen3-32b", 80),
    Run("agents", 131072, 8, "qwen3-32b", 40),
    Run("code", 131072, 4, "qwen3-30b-a3b", 80, expert_ranks=8),
    Run("agents", 32768, 8, "qwen3-30b-a3b", 80, expert_ranks=8),
)
"""Kinds of lengths and contexts take turns over models, ranks and caps. `Case.seed` is the seed of a run's own batch."""


def cases(args: Namespace) -> dict[str, Run]:
    runs = (Run("chat", 8192, 2, "llama3-8b", 80, sequences=4),) if args.reduced else RUNS
    return {f"{run.model} {run.lengths_like} {run.context // 1024}K PP {run.stages} {run.cap_gb} GB": run for run in runs}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    reduced="one run on 2 ranks",
    resumes=True,
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
