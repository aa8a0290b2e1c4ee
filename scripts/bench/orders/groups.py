"""Gain of groups of context-parallel ranks on paper: FlexSP's degrees for every sequence against one degree for all.

    python -m scripts.bench.orders.groups             all cases
    python -m scripts.bench.orders.groups --reduced   one case

Llama 3 8B on 4 pipeline ranks of 8 to 32 context-parallel ranks each, on nodes of 8 H100s with 80 GB; exchanges between nodes
take the rate of messages. Batches have sequences up to 131,072 tokens. The first ratio compares with the same microbatches of
whole sequences at the full degree, the second with greedy at the full degree; below 1 groups are faster.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from megatron_epp.contrib.flexsp.context_groups import groups_of
from megatron_epp.contrib.flexsp.degrees import flexsp
from megatron_epp.cost.memory import DEVICE_SHARE
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.tools.formulas import analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_cluster, load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.suite import DRAWS, SEQUENCES
from scripts.tables import table

MODEL, CLUSTER, PIPELINE, CONTEXT, STATE_BYTES = "llama3-8b", "h100x8", 4, 131072, 7.5
KINDS = "wikipedia", "code", "agents"


@dataclass(frozen=True, slots=True)
class Case:
    """A batch on a pipeline of context-parallel ranks."""

    lengths_like: str
    context_parallel: int
    seed: int = 0

    @property
    def problem(self) -> Problem:
        drawn = DRAWS[self.lengths_like](SEQUENCES[self.lengths_like], self.seed)
        lengths = tuple(np.minimum(drawn, CONTEXT).tolist())
        cap = int((load_cluster(CLUSTER).device_memory_gb or 80) * DEVICE_SHARE * 2**30)
        return Problem(lengths, tuple(range(PIPELINE)), (cap,) * PIPELINE)

    @property
    def costs(self) -> Costs:
        """Costs with exchanges at the rates that a group of every size has."""
        cluster = load_cluster(CLUSTER)
        ranks = {"context_parallel_size": self.context_parallel, "seq_length": CONTEXT}
        shape = shape_of(load_flags(MODEL) | ranks)
        rates = replace(cluster.rates, devices_per_node=cluster.devices_per_node)
        layers = [shape.num_layers // PIPELINE] * PIPELINE
        return on_device(analytic_profile(shape, rates).costs(layers, state_bytes_per_parameter=STATE_BYTES))


def plans_of(case: Case) -> tuple[Plan, Plan, Plan]:
    """Plans with groups, with the same planner at the full degree, and of greedy at the full degree; all are proven."""
    problem, costs, options = case.problem, case.costs, Options(planner="flexsp")
    uniform = flexsp(problem, costs, options, smallest=case.context_parallel)
    return plan(problem, costs, options), build_plan(problem, costs, options, uniform), plan(problem, costs)


def row(args: Namespace, case: Case) -> Figures:
    plans = plans_of(case)
    divided = groups_of(plans[0].extensions)
    assert divided is not None
    degrees = sorted({group.degree for own in divided.of_chunk for group in own})
    sizes = {"lengths": case.lengths_like, "context_parallel": case.context_parallel, "seed": case.seed}
    return sizes | {"makespans_us": [of_planner.predicted.makespan_us for of_planner in plans], "degrees": degrees}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format medians over the batches of a kind; below 1 groups are faster."""
    lines = []
    for ranks, name in dict.fromkeys((row["context_parallel"], row["lengths"]) for row in rows):
        own = [row["makespans_us"] for row in rows if (row["context_parallel"], row["lengths"]) == (ranks, name)]
        ratios = [median(took_us[0] / took_us[other] for took_us in own) for other in (1, 2)]
        lines.append([ranks, name, *(f"{ratio:.3f}" for ratio in ratios)])
    return table(["context-parallel ranks", "lengths like", "over one degree", "over greedy"], lines)


def cases(args: Namespace) -> dict[str, Case]:
    chosen = [Case(name, ranks, seed) for ranks in (8, 16, 32) for name in KINDS for seed in range(1 if ranks > 16 else 3)]
    return {
        f"{case.lengths_like}, {case.context_parallel}, {case.seed}": case for case in chosen[: 1 if args.reduced else None]
    }


BENCH = Bench(about=__doc__, cases=cases, row=row, text=text, reduced="one case", takes_jobs=True)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
