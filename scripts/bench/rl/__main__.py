"""Compares an update of reinforcement learning by plans with the microbatches of RL frameworks in 1F1B, on paper.

Responses have the lengths of math problems or of agents' sessions: log-normal, of a median of 4,800 tokens up to 32K, or of
21,000 up to 131K. Four replicas share a batch. Frameworks divide it into parts of equal work and make microbatches by their own
rules; these run in 1F1B and recompute every layer, as most recipes with pipeline stages do, or none, which may not fit.
`Megatron` has all that its flags can say under the cap: virtual stages, layers of stages, rows and recompute at their best
(`megatron_epp.tools.advice.causes`). By plans run

order       verl's microbatches in the planned order, every layer recomputed
recompute   the same, with recompute by plan under the cap
slices      the samples, cut and packed, at even layers or at those of `Megatron`, whichever is faster
pairs       the same with a loss over pairs of samples, as of preferences, which all run forward before the first backward

Times are by formulas for H100s. Prints a table of times as multiples of the slices', and the peaks.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.microbatches import plan_as_given, plan_microbatches
from megatron_epp.planner.service.replica_balance import divide
from megatron_epp.port.packed import MicrobatchLengths
from megatron_epp.tools.advice.causes import Stock, StockChoices
from megatron_epp.tools.formulas import analytic_profile
from megatron_epp.tools.formulas.hardware import H100_NODE
from megatron_epp.tools.formulas.library import load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.bench.rl.rules import RULES, balanced, verl
from scripts.tables import table

REPLICAS = 4
CAP_BYTES = 72 << 30
LENGTHS = {"math": (4_800, 1.0, 1 << 15), "agents": (21_000, 0.95, 1 << 17)}
"""Median, spread of the logarithm, and most tokens of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the lengths of its samples.

    Attributes:
        model: name of a shipped file.
        stages: of the pipeline, one on each rank.
        lengths: a key of `LENGTHS`.
        samples: of a replica.
        tensor, context: ranks that share layers and tokens.
    """

    model: str
    stages: int
    lengths: str
    samples: int
    tensor: int
    context: int = 1

    @property
    def budget(self) -> int:
        """Tokens of a microbatch: of the longest response, as recipes set it."""
        return LENGTHS[self.lengths][2]

    def drawn(self, seed: int) -> tuple[int, ...]:
        """Draw the lengths of a batch for all replicas."""
        median, spread, most = LENGTHS[self.lengths]
        drawn = np.random.RandomState(seed).lognormal(math.log(median), spread, REPLICAS * self.samples)
        return tuple(int(length) for length in drawn.clip(64, most))


CASES = tuple(
    Case(model=model, stages=stages, lengths=lengths, samples=samples, tensor=tensor, context=context)
    for model, tensor, of_agents in (("llama3-8b", 1, 4), ("llama-30b", 4, 1))
    for stages in (4, 8)
    for lengths, samples, context in (("math", 128, 1), ("agents", 64, of_agents))
)
"""A replica has 4 to 32 GPUs. Of the larger model's 52 heads context-parallel ranks could not have equal parts."""


def slowest(plans: Sequence[Plan]) -> Figures:
    """Return the time of the slowest replica, and the highest peak."""
    peak_bytes = max(max(plan.predicted.peak_bytes) for plan in plans)
    return {"time_us": max(plan.predicted.makespan_us for plan in plans), "peak_bytes": peak_bytes}


class Ways:
    """One case: its costs, and its batch by every rule and plan."""

    def __init__(self, case: Case, seed: int) -> None:
        flags = load_flags(case.model) | {
            "tensor_model_parallel_size": case.tensor,
            "context_parallel_size": case.context,
            "sequence_parallel": case.tensor > 1,
            "seq_length": case.budget,
        }
        shape = shape_of(flags)
        self.case, self.lengths = case, case.drawn(seed)
        layers = even_layers(shape.num_layers, case.stages)
        self.even = Layout(layers, Placement("looped", case.stages, 1))
        profile, unblocked = (analytic_profile(own, H100_NODE) for own in (shape, replace(shape, loss_block_tokens=0)))
        self.costs_of = cache(lambda layout: profile.costs(layout.layers))
        self.whole_costs_of = cache(lambda layout: unblocked.costs(layout.layers))
        self.costs: Costs = self.costs_of(self.even)
        multiple = (case.tensor if case.tensor > 1 else 1) * (2 * case.context if case.context > 1 else 1)
        self.problem = Problem((), tuple(range(case.stages)), (CAP_BYTES,) * case.stages, token_multiple=multiple)
        self.every_layer = Options(recompute=max(layers))

    def run(self) -> dict[str, Figures]:
        """Return what every way takes."""
        shares = balanced(self.lengths, REPLICAS)
        results = {}
        for name, rule in RULES.items():
            rows = [_microbatches(rule(share, self.case.budget)) for share in shares]
            for suffix, options in (("", self.every_layer), (", no recompute", Options(recompute=0))):
                results[name + suffix] = slowest([plan_as_given(row, self.problem, self.costs, options).plan for row in rows])
        rows = [_microbatches(verl(share, self.case.budget)) for share in shares]
        results["order"] = self._planned(rows, self.every_layer)
        results["recompute"] = self._planned(rows, Options())
        stocks = [self._stock(tuple(share)) for share in shares]
        slowest_stock = max(stocks, key=lambda stock: math.inf if stock is None else stock.step_us)
        results["Megatron"] = {"time_us": math.inf, "peak_bytes": CAP_BYTES}
        if slowest_stock is not None:
            results["Megatron"] = {"time_us": slowest_stock.step_us, "peak_bytes": slowest_stock.peak_bytes}
        layouts = dict.fromkeys([self.even, *(stock.layout for stock in stocks if stock is not None)])
        results["slices"] = min((self._sliced((), layout) for layout in layouts), key=lambda figures: figures["time_us"])
        results["pairs"] = self._sliced(tuple(number // 2 for number in range(len(self.lengths))), self.even)
        return results

    def _stock(self, share: tuple[int, ...]) -> Stock | None:
        """Return Megatron's schedule at its best for a replica's samples."""
        choices = StockChoices(
            problems=(replace(self.problem, lengths=share),),
            costs_of=self.whole_costs_of,
            own_costs_of=self.costs_of,
            num_layers=self.even.num_layers,
            context=self.case.budget,
            options=Options(),
            even=self.even,
        )
        return choices.steps()[-1]

    def _planned(self, rows: Sequence[MicrobatchLengths], options: Options) -> Figures:
        try:
            return slowest([plan_microbatches(row, self.problem, self.costs, options).plan for row in rows])
        except InfeasibleError as error:
            return {"time_us": math.inf, "peak_bytes": error.least_cap_bytes}

    def _sliced(self, loss_groups: tuple[int, ...], layout: Layout) -> Figures:
        options = Options(context=self.case.budget)
        alone = tuple((replica,) for replica in range(REPLICAS))
        costs, placement = self.costs_of(layout), layout.placement.rank_of
        batch = replace(self.problem, lengths=self.lengths, loss_groups=loss_groups, placement=placement)
        shares = divide(batch, costs, alone, lambda of: about_us(of[0], costs, options)).shares
        return slowest([plan(batch.part(share), costs, options) for share in shares])


def _microbatches(rows: Sequence[Sequence[int]]) -> MicrobatchLengths:
    return tuple(map(tuple, rows))


def row(args: Namespace, case: Case) -> Figures:
    draws = [Ways(case, seed).run() for seed in range(1 if args.reduced else args.draws)]
    return {"model": case.model, "stages": case.stages, "lengths": case.lengths, "draws": draws}


def cells_of(row: Figures) -> list[object]:
    """Format a row: the mean time of slices, and of other ways the mean multiple of it; ``*`` where the cap is exceeded."""
    draws = row["draws"]
    slices_s = fmean(draw["slices"]["time_us"] for draw in draws) / 1e6
    cells: list[object] = [row["model"], row["stages"], row["lengths"], f"{slices_s:.1f} s"]
    cells.append(f"{fmean(draw['verl']['time_us'] / draw['recompute']['time_us'] for draw in draws):.2f}x")
    for name in (name for name in draws[0] if name != "slices"):
        ratio = fmean(draw[name]["time_us"] / draw["slices"]["time_us"] for draw in draws)
        exceeds = any(draw[name]["peak_bytes"] > CAP_BYTES for draw in draws)
        cells.append("no plan fits" if math.isinf(ratio) else f"{ratio:.2f}x{'*' * exceeds}")
    return cells


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    names = [name for name in rows[0]["draws"][0] if name != "slices"]
    lines = table(["model", "stages", "lengths", "slices", "gain in verl", *names], map(cells_of, rows))
    return f"{lines}\n* more than the cap of {CAP_BYTES >> 30} GiB"


def cases(args: Namespace) -> dict[str, Case]:
    chosen = (replace(CASES[0], samples=6),) if args.reduced else CASES
    return {f"{case.model}, {case.stages} stages, {case.lengths}": case for case in chosen}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    flags={"draws": {"type": int, "default": 3, "help": "batches of a case (default: 3)"}},
    reduced="the first case, with few samples: shows that it runs",
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
