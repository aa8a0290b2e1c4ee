"""Compares plans with other systems of 2026 for sequences of very different lengths, on paper: equal devices and memory.

Every system has the parallel sizes that suit it best, and the microbatches of the best of a few budgets of tokens. Whole
sequences run in 1F1B of one stage per rank, with the fewest recomputed layers that fit, equal for all microbatches:

dp_balanced     Megatron's scheduler of packed sequences: rows in the order of the data, dealt to replicas
dynamic CP      its dynamic context parallelism: each sequence on as many data- and context-parallel ranks as its length asks
verl, slime, NeMo-RL   microbatches of replicas with equal work, as these frameworks make them
any degree      sequences on any number of ranks without a pipeline, as FCP (arXiv 2602.21788) has them, without any imbalance
                between ranks or exchange of keys and values: no such system is faster
slices          Seq1F1B (Megatron-LM's pull request 3116): slices of every sequence, short ones packed, balanced replicas
Megatron        1F1B with virtual stages, layers, balanced rows and recompute at their best (`megatron_epp.tools.advice.causes`)
plans           what `megatron-epp advise` finds

Times are of a step by formula, with the reduction of gradients. Ranks that share experts do not wait for each other's rows,
which favours all but plans. Prints times as multiples of those of plans, and the best sizes.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_epp.contrib.flexsp.context_groups import ContextGroups
from megatron_epp.contrib.flexsp.degrees import Divided
from megatron_epp.contrib.flexsp.group_costs import GroupedDecisions
from megatron_epp.cost.work import causal_pairs
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.fit import is_within, peaks_bytes, uniform_steps
from megatron_epp.planner.microbatches import plan_in_order
from megatron_epp.planner.order import slice_groups
from megatron_epp.tools.advice.configuration_search import advise, candidates
from megatron_epp.tools.advice.judge import exactly
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.cli.planning_flags import cap_of
from megatron_epp.tools.formulas.library import load_cluster, load_flags
from scripts.bench.frame import Bench, Figures
from scripts.bench.rivals.packing_rules import dp_balanced, dynamic_context
from scripts.bench.rl.rules import RULES, balanced
from scripts.tables import table

CLUSTER = "h100x8"
BUDGETS = (1, 2, 4)
"""Tokens of a row, in contexts."""
SHORT = "lognormal"
Way = Callable[[Question, Configuration], float]
"""Microseconds of a step by a system at given parallel sizes. Raises `EppError` if it does not fit, or cannot be."""


def lognormal(count: int, seed: int) -> np.ndarray:
    """Draw as Megatron's own benchmark of dynamic context parallelism does: 128 to 8,192 tokens, a mean of 1,024."""
    sigma = 1.5
    drawn = np.random.RandomState(seed).lognormal(math.log(1024) - sigma**2 / 2, sigma, count)
    return drawn.clip(128, 8192).astype(int)


DRAWS = {SHORT: lognormal, **{name: getattr(sequence_lengths, name) for name in ("wikipedia", "code", "chat", "agents")}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, devices, and lengths of a batch."""

    model: str
    devices: int
    lengths: str
    sequences: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.devices} GPUs, {self.lengths}"

    def question(self) -> Question:
        cluster = load_cluster(CLUSTER)
        lengths = tuple(np.minimum(DRAWS[self.lengths](self.sequences, 0), self.context).tolist())
        return Question(
            load_flags(self.model),
            cluster,
            self.devices,
            cap_of(None, cluster),
            lengths,
            max(lengths),
            vocabulary=(False, True),
            opens_weights=True,
        )


CASES = [
    *(Case(model="llama3-8b", devices=count, lengths=SHORT, sequences=2 * count, context=8192) for count in (4, 8, 16, 32, 64)),
    *(
        Case(model=model, devices=devices, lengths=lengths, sequences=sequences, context=131072)
        for model, devices in (("llama3-8b", 32), ("llama3-70b", 64), ("qwen3-30b-a3b", 32), ("glm-4.5-air", 64))
        for lengths, sequences in (("wikipedia", 512), ("code", 256), ("chat", 512), ("agents", 256))
    ),
]


def in_rows(rows: Sequence[Sequence[int]], asked: Question, config: Configuration) -> float:
    """Return the makespan of a replica's microbatches in 1F1B."""
    microbatches = tuple(map(tuple, rows))
    problem, costs = asked.problem(config, ()), asked.costs(config)
    return plan_in_order(microbatches, problem, costs, asked.options, plain=True).plan.predicted.makespan_us


def by_rows(rows_of: Callable[[Question, Configuration, int], Sequence[Sequence[Sequence[int]]] | None]) -> Way:
    """Return the way of a rule from a budget of tokens to the rows of every replica."""

    def step_us(asked: Question, config: Configuration) -> float:
        least_us = math.inf
        for contexts in BUDGETS:
            replicas = rows_of(asked, config, contexts * asked.context)
            if replicas is not None:
                with suppress(InfeasibleError):
                    slowest = sorted(replicas, key=lambda rows: -sum(length**2 for row in rows for length in row))[:2]
                    least_us = min(least_us, max(in_rows(rows, asked, config) for rows in slowest))
        return least_us

    return step_us


def with_dynamic_context(asked: Question, config: Configuration) -> float:
    """Return the time of Megatron's dynamic context parallelism, of which a microbatch takes as long as its slowest group."""
    if config.data > 1 or config.context == 1:
        return math.inf
    least_us, problem, costs = math.inf, asked.problem(config, asked.lengths), asked.costs(config)
    for doubled in range(4):
        rank_tokens = (-(-asked.context // config.context)) << doubled
        divided = []
        for groups in dynamic_context(asked.lengths, config.context, rank_tokens):
            groups.sort(key=lambda group: -group.degree)
            divided.append(Divided(tuple(own.degree for own in groups), tuple(tuple(own.sequences) for own in groups)))
        chunks, of_chunk = zip(*(own.chunk(asked.lengths) for own in divided), strict=True)
        fullest = [max(group.rank_tokens(chunk) for group in own) for own, chunk in zip(of_chunk, chunks, strict=True)]
        extension = ContextGroups(config.context, of_chunk, tuple(fullest))
        order = seq1f1b_order(slice_groups(chunks), problem.num_stages, False)
        decisions = GroupedDecisions(chunks, order, [[0] * len(chunks)] * config.pipeline, extensions=(extension,))
        tables = decisions.tables(problem, costs)
        for layers in range(max(config.layers) + 1):
            again = uniform_steps(tables, layers)
            if is_within(peaks_bytes(order, tables, again), problem.cap_bytes):
                least_us = min(least_us, replace(decisions, recompute_steps=again).makespan_us(problem, costs))
                break
    return least_us


def at_any_degree(asked: Question, config: Configuration) -> float:
    """Return the time of sequences that all ranks share evenly, at no cost, without a pipeline."""
    if config.pipeline > 1 or config.context > 1:
        return math.inf
    costs, tokens = asked.costs(config), -(-asked.context // config.data)
    in_rows([[tokens]], asked, config)  # a part of the longest sequence fits
    work = asked.tokens / config.data, sum(causal_pairs(0, length) for length in asked.lengths) / config.data
    return float(costs.line(0, "forward").time_us(*work) + costs.line(0, "backward").time_us(*work))


def in_slices(asked: Question, config: Configuration) -> float:
    """Return the time of Seq1F1B."""
    sliced = replace(asked, options=replace(asked.options, planner="seq1f1b", context=asked.context))
    return exactly(sliced, config).plan.predicted.makespan_us


def of_framework(name: str) -> Way:
    """Return the way of a framework: replicas of equal work, and microbatches by its own rule."""
    return by_rows(lambda asked, config, budget: [RULES[name](share, budget) for share in balanced(asked.lengths, config.data)])


WAYS: dict[str, Way] = {
    "dp_balanced": by_rows(lambda asked, config, budget: dp_balanced(asked.lengths, budget, config.data)),
    "dynamic CP": with_dynamic_context,
    **{name: of_framework(name) for name in RULES},
    "any degree": at_any_degree,
    "slices": in_slices,
}


def row(args: Namespace, case: Case) -> Figures:
    """Return the least time of every system, with its sizes."""
    asked = case.question()
    figures: Figures = {"tokens": asked.tokens, "sequences": len(asked.lengths), "longest": max(asked.lengths)}
    configs = [config for config in candidates(asked)[0] if not config.latents or config.latents == "off"]
    configs = [replace(config, shards_vocabulary=False) for config in configs]
    for name, way in WAYS.items():
        figures[name] = min((_step(way, asked, config) for config in configs), key=lambda step: step["us"])
    advice = advise(asked)
    fastest = min(advice.best, key=lambda judged: judged.parts.step_us)
    figures["plans"] = {"us": fastest.parts.step_us, "sizes": fastest.config.name}
    plain = advice.plain
    figures["Megatron"] = {"us": plain.stock.step_us, "sizes": plain.config.name} if plain else {"us": math.inf, "sizes": ""}
    return figures


def _step(way: Way, asked: Question, config: Configuration) -> dict[str, Any]:
    with suppress(EppError):
        return {"us": way(asked, config) + asked.reduction_us(config), "sizes": config.name}
    return {"us": math.inf, "sizes": ""}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    names = [*WAYS, "Megatron"]
    lines = []
    for row in rows:
        ours = row["plans"]["us"]
        times = [f"{row[name]['us'] / ours:.2f}x" if math.isfinite(row[name]["us"]) else "-" for name in names]
        lines.append([row["case"], f"{row['tokens']:,}", f"{ours / 1e6:.3g} s", *times])
    sizes = [f"{row['case']}: {name} {row[name]['sizes']}" for row in rows for name in ("plans", *names) if row[name]["sizes"]]
    return "\n".join([table(["case", "tokens", "plans", *names], lines), "", *sizes])


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {case.name: case for case in CASES},
    row=row,
    text=text,
    resumes=True,
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
