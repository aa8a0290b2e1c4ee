"""How robust plans are, on paper: iterations whose passes, messages or ranks take other times than were planned.

Plans keep their order, and each pass starts as soon as what it needs has arrived. *Noise*: every pass takes a time with a
lognormal factor of mean 1. *Pauses*: one pass in a hundred takes five times as long. *Messages*: each comes later by an
exponential time. *Slow rank*: one takes 10 % longer, each rank in turn. *Stages*: the times of each are wrong by a lognormal
factor. For the last two *learnt* is a plan by the times that are so.

*Ahead by n* is a runtime that is not built: where the next pass of a rank waits, it runs one of up to n behind it whose inputs
are there, if the passes that it overtakes still have room under the memory cap. Without a limit of n that is a schedule as a
hint (RRFP, arXiv 2605.18750). Every rank decides at no cost, and tensor-parallel ranks agree.
"""

from __future__ import annotations

import heapq
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from megatron_epp.cost.blocks import StageCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import Plan
from megatron_epp.plan.graph import Graph, build_graph
from megatron_epp.plan.simulation import play
from megatron_epp.planner import Options
from scripts.bench.frame import Bench, Figures, geometric_mean
from scripts.bench.planner.suite import Case, fitting, name_of, sampled_cases
from scripts.tables import table

EVERY = 3
"""One in so many cases of `bench/planner` is run."""
DRAWS = 10
NOISE = (0.02, 0.05, 0.10, 0.20)
"""Standard deviations of the logarithm of a pass's time."""
LATE_US = 2000.0
"""Mean time by which a message comes late."""
PAUSES, LONGER = 0.01, 5.0
"""Share of passes that are longer, and how many times."""
SLOW, WRONG = 1.10, 0.10
"""Factor of a slow rank's times, and standard deviation of the logarithm of those of stages."""
AHEAD = {"1 ahead": 1, "4 ahead": 4, "ready first": 64}
"""Passes that one may overtake at most."""
RUNS = {
    "elastic": Options(),
    "elastic, W": Options(split_weight=True),
    "elastic, half as many chunks": Options(),
    "Seq1F1B": Options(planner="seq1f1b"),
    "1F1B, packed": Options(planner="1f1b-packed"),
    "ZB-H1": Options(planner="zb-h1"),
}
"""Planners; chunks are halved once their number is known."""
HALVED = "elastic, half as many chunks"
MAY_RUN_AHEAD = ("elastic", "1F1B, packed")


def plans_of(case: Case) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that fit."""
    chunks = 0
    for name, options in RUNS.items():
        asked = replace(options, chunks=chunks / 2) if name == HALVED else replace(options, context=case.context)
        if (plan := fitting(case.problem, case.costs, asked)) is not None:
            chunks = chunks or len(plan.chunks)
            yield name, plan


def scaled(costs: PipelineCosts, factors: Sequence[float]) -> PipelineCosts:
    """Return costs of which each stage's passes take a multiple of the time."""
    return replace(costs, stages=tuple(map(_scaled, costs.stages, factors)))


def _scaled(stage: StageCosts, factor: float) -> StageCosts:
    blocks = []
    for block in stage.blocks:
        modes = {name: replace(mode, again=mode.again.scaled(factor)) for name, mode in block.recompute.items()}
        passes = {name: getattr(block, name).scaled(factor) for name in ("forward", "backward", "weight", "exchange")}
        blocks.append(replace(block, recompute=modes, **passes))
    return replace(stage, blocks=tuple(blocks))


@dataclass(frozen=True)
class Iterations:
    """Iterations of one plan, as multiples of its planned time."""

    plan: Plan
    graph: Graph

    @classmethod
    def of(cls, plan: Plan) -> Iterations:
        return cls(plan, build_graph(plan))

    def longer(self, change: Callable[[Graph, np.random.RandomState], Graph], draws: int = DRAWS, ahead: int = 0) -> float:
        """Return the mean over some draws of what changes times."""
        graphs = (change(self.graph, np.random.RandomState(seed)) for seed in range(draws))
        return fmean(_makespan_us(graph, self.plan, ahead) for graph in graphs) / self.plan.predicted.makespan_us


def noisy(deviation: float) -> Callable[[Graph, np.random.RandomState], Graph]:
    """Return a change of the time of every pass."""
    return lambda graph, random: _timed(graph, _lognormal(random, deviation, len(graph.steps)))


def pauses(graph: Graph, random: np.random.RandomState) -> Graph:
    """Return the graph with some passes that take far longer."""
    return _timed(graph, np.where(random.uniform(size=len(graph.steps)) < PAUSES, LONGER, 1.0))


def late(graph: Graph, random: np.random.RandomState) -> Graph:
    """Return the graph with messages that come late."""
    return replace(graph, need_us=graph.need_us + (graph.need_us > 0) * random.exponential(LATE_US, len(graph.need_us)))


def by_rank(factors: Sequence[float]) -> Callable[[Graph, np.random.RandomState], Graph]:
    """Return a change of the times of ranks."""
    return lambda graph, _: _timed(graph, np.array(factors)[graph.columns.ranks()])


def _lognormal(random: np.random.RandomState, deviation: float, count: int) -> np.ndarray:
    return np.exp(random.normal(-(deviation**2) / 2, deviation, count))


def _timed(graph: Graph, factors: np.ndarray) -> Graph:
    return replace(graph, columns=replace(graph.columns, time_us=graph.columns.time_us * factors))


def _makespan_us(graph: Graph, plan: Plan, ahead: int) -> float:
    return max(play(graph).end_us) if not ahead else Ahead(graph, plan, ahead).run()


class Ahead:
    """Run of a plan in which a rank may run a pass before others that wait."""

    def __init__(self, graph: Graph, plan: Plan, most: int) -> None:
        self.most, self.plan = most, plan
        columns = graph.columns
        self.took_us, self.alloc, self.free = (
            getattr(columns, name).tolist() for name in ("time_us", "alloc_bytes", "free_bytes")
        )
        self.left = [list(numbers) for numbers in graph.tracks[: graph.num_ranks]]
        self.order: list[list[int]] = [[] for _ in self.left]  # in which each rank has run them
        self.live = [*plan.static_bytes]
        self.is_busy = [False] * graph.num_ranks
        self.rank_of = columns.ranks().tolist()
        self.arrives_us = [0.0] * len(self.took_us)
        self.missing = np.diff(graph.need_starts).tolist()
        self.readers: list[list[tuple[int, float]]] = [[] for _ in self.took_us]
        for number in range(len(self.took_us)):
            for need, message_us in graph.needs_of(number):
                self.readers[need].append((number, message_us))

    def run(self) -> float:
        """Return the makespan in microseconds."""
        events: list[tuple[float, int, int]] = [(0.0, rank, -1) for rank in range(len(self.left))]  # time, rank, step that ends
        now_us = 0.0
        while events:
            now_us, rank, ended = heapq.heappop(events)
            if ended >= 0:
                self.is_busy[rank] = False
                for number, message_us in self.readers[ended]:
                    self.missing[number] -= 1
                    self.arrives_us[number] = max(self.arrives_us[number], now_us + message_us)
                    if not self.missing[number]:
                        heapq.heappush(events, (self.arrives_us[number], self.rank_of[number], -1))
            if not self.is_busy[rank] and (at := self._next(rank, now_us)) is not None:
                number = self.left[rank].pop(at)
                self.order[rank].append(number)
                self.is_busy[rank] = True
                self.live[rank] += self.alloc[number] - self.free[number]
                heapq.heappush(events, (now_us + self.took_us[number], rank, number))
        assert not any(self.left), "a rank waits for ever"
        return now_us

    def _next(self, rank: int, now_us: float) -> int | None:
        overtaken_bytes, peak_bytes, cap = 0, -math.inf, self.plan.cap_bytes[rank]
        for at, number in enumerate(self.left[rank][: self.most + 1]):
            fits = self.live[rank] + max(self.alloc[number], self.alloc[number] - self.free[number] + peak_bytes) <= cap
            if not self.missing[number] and self.arrives_us[number] <= now_us and (fits or not at):
                return at
            peak_bytes = max(peak_bytes, overtaken_bytes + self.alloc[number])
            overtaken_bytes += self.alloc[number] - self.free[number]
        return None


def row(args: Namespace, case: Case) -> Figures:
    """Return what every plan of a case takes, as multiples of its planned time."""
    stages = case.problem.num_stages
    slow = [[SLOW if rank == at else 1.0 for rank in range(stages)] for at in range(stages)]
    wrong = [_lognormal(np.random.RandomState(seed), WRONG, stages).tolist() for seed in range(DRAWS)]
    by_ranks = {"slow rank": slow, "stages": wrong}
    changes = {f"noise {deviation:.0%}": noisy(deviation) for deviation in NOISE} | {"pauses": pauses, "messages": late}
    plans = dict(plans_of(case))
    figures: Figures = {"planned_us": {name: plan.predicted.makespan_us for name, plan in plans.items()}}
    for name, plan in plans.items():
        own = Iterations.of(plan)
        for ahead, most in {"": 0, **(AHEAD if name in MAY_RUN_AHEAD else {})}.items():
            means = {key: own.longer(change, ahead=most) for key, change in changes.items()}
            for key, every in by_ranks.items():
                means[key] = fmean(own.longer(by_rank(factors), 1, most) for factors in every)
            figures[f"{name}, {ahead}" if ahead else name] = means
    if "elastic" in plans:
        figures["elastic, learnt"] = {
            key: fmean(_learnt_us(case, factors) for factors in every) / plans["elastic"].predicted.makespan_us
            for key, every in by_ranks.items()
        }
    return figures


def _learnt_us(case: Case, factors: Sequence[float]) -> float:
    plan = fitting(case.problem, scaled(case.costs, factors), Options(context=case.context))
    assert plan is not None, "times do not change what fits"
    return plan.predicted.makespan_us


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    columns = [f"noise {deviation:.0%}" for deviation in NOISE] + ["pauses", "messages", "slow rank", "stages"]
    names = list(dict.fromkeys(name for row in rows for name in row if isinstance(row[name], dict) and name != "planned_us"))
    lines = []
    for name in names:
        of_cases = [row for row in rows if name in row]
        base = name if name in rows[0]["planned_us"] else name.rpartition(", ")[0]
        both = [row["planned_us"] for row in of_cases if "elastic" in row["planned_us"]]
        mean = geometric_mean([planned[base] / planned["elastic"] for planned in both])
        means = [geometric_mean([row[name][key] for row in of_cases if key in row[name]]) for key in columns]
        lines.append([name, str(len(of_cases)), *("" if each is None else f"{each:.3f}" for each in (mean, *means))])
    return table(["plans", "cases", "planned / elastic", *columns], lines)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {name_of(case): case for case in sampled_cases()[::EVERY]},
    row=row,
    text=text,
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
