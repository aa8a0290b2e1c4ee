"""Gain of groups of context-parallel ranks on paper: FlexSP's degrees for every sequence against one degree for all.

    python -m scripts.bench.orders.groups             all cases
    python -m scripts.bench.orders.groups --reduced   one case

Llama 3 8B on 4 pipeline ranks of 8 to 32 context-parallel ranks each, on nodes of 8 H100s with 80 GB; exchanges between nodes
take the rate of messages. Ratios compare with greedy at the full degree, but for the first; below 1 the named is faster:

- over one degree: FlexSP, over the same microbatches of whole sequences at the full degree.
- FlexSP: whole sequences in groups.
- by chunk: greedy's slices at the full degree, and its chunks of whole sequences in groups where these are faster: chunks and
  order of the better of two searches, of which one knows no groups and the other takes such chunks to exchange nothing. No plan
  has that yet: times of steps are changed in plans that are simulated again.
- replicas: greedy at a lower degree, of 8 or more, with as many times more replicas, which divide the batch; the fastest.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

import numpy as np

from megatron_epp.contrib.flexsp.context_groups import ContextGroups, groups_of
from megatron_epp.contrib.flexsp.degrees import FULLEST, divide_ranks, flexsp
from megatron_epp.contrib.flexsp.group_costs import GroupCosts
from megatron_epp.cost.memory import DEVICE_SHARE
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import ChunkWork, TimeColumn, work_of
from megatron_epp.plan import InfeasibleError, Op, Plan, Step
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.service.replica_balance import divide
from megatron_epp.tools.formulas import analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_cluster, load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.suite import DRAWS, SEQUENCES
from scripts.tables import table

MODEL, CLUSTER, PIPELINE, CONTEXT, STATE_BYTES, NODE = "llama3-8b", "h100x8", 4, 131072, 7.5, 8
KINDS = "wikipedia", "code", "agents"
LONG = 131072, 262144
"""Sequences of as many tokens, of which some batches have one besides 512 like `wikipedia`."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch on a pipeline of context-parallel ranks."""

    lengths_like: str
    context_parallel: int
    seed: int = 0
    long: int = 0  # tokens of one more sequence; 0 for none

    @property
    def name(self) -> str:
        return self.lengths_like + (f", one of {self.long:,}" if self.long else "")

    @property
    def problem(self) -> Problem:
        drawn = DRAWS[self.lengths_like](SEQUENCES[self.lengths_like], self.seed)
        lengths = (*(self.long,) * bool(self.long), *np.minimum(drawn, CONTEXT).tolist())
        cap = int((load_cluster(CLUSTER).device_memory_gb or 80) * DEVICE_SHARE * 2**30)
        return Problem(lengths, tuple(range(PIPELINE)), (cap,) * PIPELINE)

    def costs(self, context_parallel: int) -> PipelineCosts:
        """Return costs with exchanges at the rates that a group of every size has."""
        cluster = load_cluster(CLUSTER)
        ranks = {"context_parallel_size": context_parallel, "seq_length": max(CONTEXT, self.long)}
        shape = shape_of(load_flags(MODEL) | ranks)
        rates = replace(cluster.rates, devices_per_node=cluster.devices_per_node)
        layers = [shape.num_layers // PIPELINE] * PIPELINE
        return on_device(analytic_profile(shape, rates).costs(layers, state_bytes_per_parameter=STATE_BYTES))


@dataclass(frozen=True, slots=True)
class WithoutExchange(PipelineCosts):
    """Costs by which chunks of whole sequences exchange nothing, as if every sequence had a rank of its own."""

    def _time_us(self, stage: int, name: str, work: ChunkWork) -> TimeColumn:
        times_us = PipelineCosts._time_us(self, stage, name, work)
        passes = self.stages[stage].num_cached_layers * (name != "weight")
        return np.where(work.sliced, times_us, times_us - passes * self.context_exchange_us[-1] * work.tokens)


def by_chunk_us(planned: Plan, planned_with: PipelineCosts, costs: PipelineCosts) -> float:
    """Return the makespan of a plan whose chunks of whole sequences run in groups where these are faster.

    Not of a plan whose fullest rank would then exceed its cap: it is infinite.
    """
    grouped, stages = GroupCosts(costs), range(planned.num_stages)
    slowest = max(stages, key=costs.num_layers.__getitem__)
    lines = {1 << power: grouped.line(slowest, 1 << power) for power in range(len(costs.context_exchange_us))}
    work = work_of(planned.chunks, planned.lengths, planned.token_multiple)
    before, now = ([[of.forward_us(s, work), of.backward_us(s, work)] for s in stages] for of in (planned_with, costs))
    fuller = dict[int, float]()
    for c, whole in enumerate(planned.chunks):
        if whole.slice_of(planned.lengths) is not None:
            continue
        sequences = sorted((segment.sequence for segment in whole.segments), key=lambda q: -planned.lengths[q])
        for fullest in FULLEST[:2]:
            chunk, groups = divide_ranks(sequences, planned.lengths, lines, fullest).chunk(planned.lengths)
            tokens = max(group.rank_tokens(chunk) for group in groups)
            divided = ContextGroups(grouped.num_ranks, (groups,), (tokens,))
            times_us = [[column[0] for column in grouped.pass_us(s, divided, (chunk,))] for s in stages]
            if sum(map(sum, times_us)) < sum(column[c] for own in now for column in own):
                fuller[c] = max(1.0, tokens * grouped.num_ranks / chunk.num_tokens)
                for own, others in zip(now, times_us, strict=True):
                    own[0][c], own[1][c] = others

    def changed(step: Step) -> Step:
        op, s, c = step.action
        column = (Op.F, Op.B).index(op)
        alloc, free = (int(fuller.get(c, 1.0) * num_bytes) for num_bytes in (step.alloc_bytes, step.free_bytes))
        return Step(step.action, step.time_us + now[s][column][c] - before[s][column][c], alloc, free)

    played = simulate(replace(planned, ranks=tuple(tuple(map(changed, row)) for row in planned.ranks)))
    fits = all(peak <= cap for peak, cap in zip(played.peak_bytes, planned.cap_bytes, strict=True))
    return played.makespan_us if fits else math.inf


def replicas_us(case: Case) -> float:
    """Return the makespan of greedy at the best degree below the case's that is a node or more, with replicas instead."""
    least_us, degree = math.inf, case.context_parallel // 2
    while degree >= NODE:
        least_us = min(least_us, _divided_us(case, degree))
        degree //= 2
    return least_us


def _divided_us(case: Case, degree: int) -> float:
    costs, groups = case.costs(degree), tuple((replica,) for replica in range(case.context_parallel // degree))
    try:
        return max(divide(case.problem, costs, groups, lambda own: plan(own[0], costs).predicted.makespan_us).makespan_us)
    except InfeasibleError:
        return math.inf


def row(args: Namespace, case: Case) -> Figures:
    problem, costs, options = case.problem, case.costs(case.context_parallel), Options(planner="flexsp")
    uniform = build_plan(problem, costs, options, flexsp(problem, costs, options, smallest=case.context_parallel))
    groups, greedy = plan(problem, costs, options), plan(problem, costs)
    known = {field.name: getattr(costs, field.name) for field in fields(costs)}
    bound = WithoutExchange(**known)
    searched = ((greedy, costs), (plan(problem, bound), bound))
    divided = groups_of(groups.extensions)
    assert divided is not None
    degrees = sorted({group.degree for own in divided.of_chunk for group in own})
    times_us = {
        "one degree": uniform.predicted.makespan_us,
        "FlexSP": groups.predicted.makespan_us,
        "greedy": greedy.predicted.makespan_us,
        "by chunk": min(greedy.predicted.makespan_us, *(by_chunk_us(*own, costs) for own in searched)),
        "replicas": replicas_us(case),
    }
    sizes = {"lengths": case.name, "context_parallel": case.context_parallel, "seed": case.seed}
    return sizes | {"makespans_us": times_us, "degrees": degrees}


RATIOS = ("FlexSP", "one degree"), ("FlexSP", "greedy"), ("by chunk", "greedy"), ("replicas", "greedy")


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format medians over the batches of a kind."""
    lines = []
    for ranks, name in dict.fromkeys((row["context_parallel"], row["lengths"]) for row in rows):
        own = [row["makespans_us"] for row in rows if (row["context_parallel"], row["lengths"]) == (ranks, name)]
        ratios = (median(took_us[ours] / took_us[theirs] for took_us in own) for ours, theirs in RATIOS)
        lines.append([ranks, name, *(f"{ratio:.3f}" if math.isfinite(ratio) else "-" for ratio in ratios)])
    return table(["ranks", "lengths like", *(f"{ours} / {theirs}" for ours, theirs in RATIOS)], lines)


def cases(args: Namespace) -> dict[str, Case]:
    chosen = [Case(name, ranks, seed) for ranks in (8, 16, 32) for name in KINDS for seed in range(1 if ranks > 16 else 3)]
    chosen += [Case("wikipedia", ranks, 0, long) for ranks in (16, 32) for long in LONG]
    return {f"{case.name}, {case.context_parallel}, {case.seed}": case for case in chosen[: 1 if args.reduced else None]}


BENCH = Bench(about=__doc__, cases=cases, row=row, text=text, reduced="one case", takes_jobs=True)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
