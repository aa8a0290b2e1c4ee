"""Measures, on paper, what replicas that share experts lose to running one order: their plan over plans of each by itself.

    python -m scripts.bench.lockstep                all cases: five models, three kinds of lengths
    python -m scripts.bench.lockstep --reduced      two of them

Both are of the same batch with the same costs, caps and even layers, divided over the replicas for the one or the other; the
time is that of the slowest replica. A fair share is the batch's work over the replicas: where a sequence is more than that, its
replica bounds both. Efficiency is the fair share, spread over the ranks, over the makespan. Costs are analytic.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from statistics import median
from time import process_time

import numpy as np

from megatron_epp.data import sequence_lengths
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.service.replica_balance import divide, sequence_work
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.formulas.library import load_cluster, load_flags
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

CLUSTER, CAP_GIB, TRIES = "h100x8", 72, 8
SIZES = {
    "qwen3-30b-a3b": [(1, 4, 8, 8), (2, 4, 4, 8), (1, 4, 16, 16)],
    "glm-4.5-air": [(4, 4, 4, 8)],
    "moonlight-16b-a3b": [(1, 4, 8, 8)],
    "qwen3-235b-a22b": [(4, 8, 8, 32)],
    "mixtral-8x7b": [(2, 4, 4, 8)],
}
"""Tensor-, pipeline-, data- and expert-parallel sizes by model."""
KINDS = {"reasoning": 16, "code": 16, "chat": 32}
"""Sequences of a replica by the kind of lengths."""
CONTEXT = 32768


def drawn(kind: str, count: int, seed: int) -> tuple[int, ...]:
    """Lengths by kind and seed; those of reasoning are log-normal, about 5,000 tokens at the median."""
    if kind == "reasoning":
        lengths = np.exp(np.random.default_rng(seed).normal(8.5, 0.75, count)).astype(int)
    else:
        lengths = getattr(sequence_lengths, kind)(count, seed)
    return tuple(int(min(CONTEXT, max(32, length))) for length in lengths)


@dataclass(frozen=True)
class Case:
    model: str
    sizes: tuple[int, int, int, int]
    kind: str
    seed: int

    @cached_property
    def question(self) -> Question:
        tensor, pipeline, data, _ = self.sizes
        lengths = drawn(self.kind, KINDS[self.kind] * data, self.seed)
        flags, cluster = load_flags(self.model), load_cluster(CLUSTER)
        options = Options(context=CONTEXT)
        return Question(flags, cluster, tensor * pipeline * data, CAP_GIB << 30, lengths, CONTEXT, options=options)

    @cached_property
    def config(self) -> Configuration:
        tensor, pipeline, data, expert = self.sizes
        config = Configuration(tensor, 1, pipeline, data, expert=expert)
        return replace(config, layers=self.question.even_layers(config))

    def makespan_us(self, groups: Sequence[tuple[int, ...]]) -> float:
        """Makespan of the slowest group of replicas that run one order."""
        costs = self.question.costs(self.config)
        problem = self.question.problem(self.config, self.question.lengths)
        options = self.question.options
        division = divide(problem, costs, groups, lambda own: max(about_us(of, costs, options) for of in own), TRIES)
        plans = (
            plan_lockstep([self.question.problem_of(self.config, division.shares[each]) for each in group], costs, options)
            for group in groups
        )
        return max(plan.predicted.makespan_us for of_group in plans for plan in of_group)


def row(args: Namespace, case: Case) -> Figures:
    """Return the figures of one batch."""
    question, config = case.question, case.config
    work_us = sequence_work(question.problem(config, question.lengths), question.costs(config))
    share_us = sum(work_us) / config.data
    start_s = process_time()
    try:
        together_us = case.makespan_us(config.lockstep_groups)
        planned_s = process_time() - start_s
        alone_us = case.makespan_us([(replica,) for replica in range(config.data)])
    except InfeasibleError as error:
        return {"skipped": str(error).splitlines()[0]}
    return {
        "together_us": together_us,
        "alone_us": alone_us,
        "loss": together_us / alone_us - 1,
        "efficiency": share_us / together_us,
        "is_fair": max(work_us) <= share_us,
        "planned_s": planned_s,
    }


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format the loss of every batch, and their median and worst."""
    planned = [each for each in rows if "loss" in each]
    cells = [
        [
            each["case"],
            f"{each['together_us'] / 1e3:,.0f}",
            f"{each['alone_us'] / 1e3:,.0f}",
            f"{each['loss']:+.1%}",
            f"{each['efficiency']:.3f}",
            f"{each['planned_s']:.1f}",
        ]
        for each in planned
    ]
    titles = ["batch", "one order, ms", "each its own, ms", "loss", "efficiency", "planning, s"]
    lines = [table(titles, cells)]
    for name, some in (("all", planned), ("none with a sequence above a fair share", [e for e in planned if e["is_fair"]])):
        losses = [each["loss"] for each in some] or [0.0]
        lines.append(f"{len(some)} batches, {name}: {median(losses):.1%} at the median, {max(losses):.1%} at worst")
    lines += [f"{each['case']}: {each['skipped']}" for each in rows if "skipped" in each]
    return "\n".join(lines)


def cases(args: Namespace) -> dict[str, Case]:
    """Return the batches by name; seeds are their numbers."""
    sizes = [(model, of) for model, every in SIZES.items() for of in every]
    named = [Case(model, of, kind, seed) for seed, ((model, of), kind) in enumerate(product(sizes, KINDS), start=1)]
    if args.reduced:
        named = [replace(case, sizes=(2, 2, 2, 4)) for case in named if case.sizes == (2, 4, 4, 8)][:2]
    return {f"{case.model} {'x'.join(map(str, case.sizes))} {case.kind}": case for case in named}


BENCH = Bench(about=__doc__, cases=cases, row=row, text=text, reduced="two batches of two replicas", takes_jobs=True)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
