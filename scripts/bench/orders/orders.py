"""Comparison of orders of other papers with greedy's, on paper: equal placement, caps and features.

    python -m scripts.bench.orders                          ten cases, all orders
    python -m scripts.bench.orders --reduced                one case, two orders
    python -m scripts.bench.orders --only sppo,chronos      ten cases, these orders

Llama 3 8B on 8 ranks, analytic costs of H100s. Every order (`contrib.papers`) has its fastest plan of several chunk tables,
with the recompute that the caps require. Greedy has the same placement, or one stage per rank where training lacks what the
order needs, and splits weight gradients off, offloads or overlaps exchanges where the schedule does. The ratio is the order's
makespan over greedy's; an order that is faster by more than 0.5 % is marked. `page.py` writes docs/schedules.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from megatron_epp.cost.model import Costs
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import InfeasibleError, Plan, PlanError
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.plan import Prediction
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.formulas import analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_cluster, load_flags, shape_of
from megatron_epp.tools.report.gantt import side_by_side
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.suite import equal, whale
from scripts.tables import table

GIB = 1 << 30
MODEL, CLUSTER, RANKS, LAYERS, STATE_BYTES = "llama3-8b", "h100x8", 8, 32, 7.5
TIE = 0.005
USUAL = Layout(even_layers(LAYERS, RANKS), Placement("looped", RANKS, 1))
"""One stage per rank."""
ORDERS: dict[str, tuple[str, int]] = {
    name: (name, entry.fixed.chunks_per_rank or 2) for name, entry in PLANNERS.entries().items() if entry.fixed is not None
} | {"interleaved, 4": ("interleaved", 4)}
"""Planners, and the stages of each rank."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch under a cap.

    Attributes:
        name: of the batch.
        cap_gib: of every rank.
        context_parallel: ranks that share each chunk.
        tensor_parallel: ranks that share each layer.
    """

    name: str
    cap_gib: int
    context_parallel: int = 1
    tensor_parallel: int = 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return LENGTHS[self.name]()


LENGTHS = {
    "64 x 8K": lambda: tuple(equal(64, 0).tolist()),
    "64 x 8K, TP 8": lambda: tuple(equal(64, 0).tolist()),
    "512 Wikipedia, one of 64K": lambda: (65536, *sequence_lengths.wikipedia(511, 0).tolist()),
    "1M and 500 tiny": lambda: tuple(whale(501, 0).tolist()),
}
CASES = (
    *(Case("64 x 8K", cap) for cap in (80, 40, 20)),
    Case("64 x 8K, TP 8", 80, tensor_parallel=8),
    *(Case("512 Wikipedia, one of 64K", cap) for cap in (80, 40, 28)),
    *(Case("1M and 500 tiny", cap, context_parallel=2) for cap in (120, 100, 80)),
)
"""Every batch with room to spare and with a cap little above the least that any placement can do with."""


DRAWN = {"64 x 8K": 40, "512 Wikipedia, one of 64K": 40, "1M and 500 tiny": 100}
"""Batches of which there is a picture, and the cap there."""
SLOWEST = 1.5
"""Makespan, as a multiple of the least, above which a plan would squeeze all others in the picture."""


@cache
def costs_of(layout: Layout, longest: int, tensor_parallel: int = 1, context_parallel: int = 1) -> Costs:
    ranks = {"tensor_model_parallel_size": tensor_parallel, "context_parallel_size": context_parallel}
    shape = shape_of(load_flags(MODEL) | ranks | {"seq_length": longest})
    profile = analytic_profile(shape, load_cluster(CLUSTER).rates)
    costs = on_device(profile.costs(layout.layers, state_bytes_per_parameter=STATE_BYTES))
    return layout.costs_of(costs, profile)


def plan_of(case: Case, layout: Layout, planner: str, split: bool, offload: bool, overlap: bool = False) -> Plan | None:
    """Make a proven plan; None where nothing fits."""
    problem = Problem(
        case.lengths, layout.placement.rank_of, (case.cap_gib * GIB,) * RANKS, token_multiple=case.context_parallel
    )
    try:
        costs = costs_of(layout, max(case.lengths), case.tensor_parallel, case.context_parallel)
        return plan(problem, costs, Options(planner=planner, split_weight=split, offload=offload, overlap_exchanges=overlap))
    except (InfeasibleError, PlanError):  # nothing fits, or the order takes no such batch
        return None


@cache
def predicted(case: Case, layout: Layout, planner: str, split: bool, offload: bool, overlap: bool) -> Prediction | None:
    """Return the figures of a proven plan; None where nothing fits."""
    plan = plan_of(case, layout, planner, split, offload, overlap)
    return None if plan is None else plan.predicted


def _figures(prediction: Prediction | None, makespan: str, prefix: str = "") -> dict[str, float | None]:
    """Return makespan, bubble and the peak of the fullest rank, by their names in a row; None where there is no plan."""
    values = (
        (None,) * 3
        if prediction is None
        else (prediction.makespan_us, prediction.bubble_fraction, max(prediction.peak_bytes) / GIB)
    )
    return dict(zip((makespan, f"{prefix}bubble", f"{prefix}peak_gib"), values, strict=True))


def layout_of(name: str) -> Layout:
    """Return the stages that an order has."""
    planner, count = ORDERS[name]
    order = PLANNERS.entries()[planner].fixed
    assert order is not None
    return order.layout(LAYERS, RANKS, count)


def draw(folder: Path) -> None:
    """Draw the plans of all orders, the fastest first, for the three batches of `DRAWN`."""
    for case in CASES:
        if DRAWN.get(case.name) != case.cap_gib or case.tensor_parallel > 1:
            continue
        candidates = [("the default planner, one stage per rank", plan_of(case, USUAL, "greedy", False, False))]
        for name, (planner, _) in ORDERS.items():
            schedule = PLANNERS.entries()[planner]
            candidates.append((name, plan_of(case, layout_of(name), planner, schedule.splits_weight, schedule.offloads)))
        plans = [(name, plan) for name, plan in candidates if plan is not None]
        plans.sort(key=lambda named_plan: named_plan[1].predicted.makespan_us)
        longest_us = SLOWEST * plans[0][1].predicted.makespan_us
        side_by_side([named_plan for named_plan in plans if named_plan[1].predicted.makespan_us <= longest_us]).savefig(
            folder / drawing(case.name), dpi=70
        )


def drawing(batch: str) -> str:
    """Return the name of the picture of a batch."""
    return f"schedules-{'-'.join(re.findall(r'[a-z0-9]+', batch.lower()))}.png"


def row(args: argparse.Namespace, case_of_order: tuple[Case, str]) -> Figures:
    """Return all figures of an order in one case."""
    case, name = case_of_order
    planner, count = ORDERS[name]
    schedule = PLANNERS.entries()[planner]
    layout = layout_of(name)
    usual = USUAL if schedule.placement == "ring" else layout
    uses = schedule.splits_weight, schedule.offloads, schedule.joins
    theirs, ours = predicted(case, layout, planner, *uses), predicted(case, usual, "greedy", *uses)
    return {
        "batch": case.name,
        "cap_gib": case.cap_gib,
        "order": name,
        "placement": f"{layout.placement.kind}, {layout.placement.num_chunks}" if count > 1 else "one stage",
        **_figures(theirs, "makespan_us"),
        **_figures(ours, "greedy_us", "greedy_"),
        "ratio": theirs.makespan_us / ours.makespan_us if theirs is not None and ours is not None else None,
    }


def text(args: argparse.Namespace, rows: Sequence[Figures]) -> str:
    lines = []
    for row in rows:
        times = [f"{row[key] / 1e3:.1f}" if row[key] else "no plan" for key in ("makespan_us", "greedy_us")]
        ratio = row["ratio"]
        mark = " faster than greedy" if ratio is not None and ratio < 1 - TIE else ""
        lines.append(
            [
                row["batch"],
                row["cap_gib"],
                row["order"],
                row["placement"],
                *times,
                "" if ratio is None else f"{ratio:.3f}{mark}",
            ]
        )
    return table(["batch", "GiB", "order", "placement", "ms", "greedy", "ratio"], lines)


def cases(args: argparse.Namespace) -> dict[str, tuple[Case, str]]:
    of_orders = product(CASES[:1], ("interleaved, 4", "zb-v")) if args.reduced else product(CASES, ORDERS)
    return {f"{case.name} under {case.cap_gib} GiB, {name}": (case, name) for case, name in of_orders}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    reduced="one batch, two orders",
    takes_jobs=True,
)
