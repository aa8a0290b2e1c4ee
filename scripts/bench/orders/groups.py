"""Gain of groups of context-parallel ranks on paper: FlexSP's degrees for every sequence against one degree for all.

    python -m scripts.bench.orders.groups             all cases
    python -m scripts.bench.orders.groups --reduced   one case

Llama 3 8B on 4 pipeline ranks of 8 to 32 context-parallel ranks each, on nodes of 8 H100s with 80 GB; exchanges between nodes
take the rate of messages. Batches have sequences up to 131,072 tokens. The first ratio compares with the same microbatches of
whole sequences at the full degree, the second with greedy at the full degree; below 1 groups are faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.contrib.papers.context_groups import groups_of
from megatron_epp.contrib.papers.flexsp import flexsp
from megatron_epp.cost import Costs, analytic_profile, on_device
from megatron_epp.cost.library import load_cluster, load_flags, shape_of
from megatron_epp.cost.memory import DEVICE_SHARE
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import Plan
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from scripts.bench.planner.report import table

MODEL, CLUSTER, PIPELINE, CONTEXT, STATE_BYTES = "llama3-8b", "h100x8", 4, 131072, 7.5
DRAWS: dict[str, tuple[Callable[[int, int], np.ndarray], int]] = {
    "wikipedia": (sequence_lengths.wikipedia, 512),
    "code": (sequence_lengths.code, 128),
    "chat": (sequence_lengths.chat, 128),
}
"""Lengths, and the number of sequences of a batch."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch on a pipeline of context-parallel ranks."""

    lengths_like: str
    context_parallel: int
    seed: int = 0

    @property
    def problem(self) -> Problem:
        draw, count = DRAWS[self.lengths_like]
        lengths = tuple(np.minimum(draw(count, self.seed), CONTEXT).tolist())
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


def row(case: Case) -> list[str]:
    """Figures of a case as text."""
    groups, uniform, greedy = plans_of(case)
    divided = groups_of(groups.extensions)
    assert divided is not None
    degrees = sorted({group.degree for own in divided.of_chunk for group in own})
    took_us = groups.predicted.makespan_us
    ratios = [f"{took_us / plan.predicted.makespan_us:.3f}" for plan in (uniform, greedy)]
    return [
        case.lengths_like,
        str(case.context_parallel),
        str(case.seed),
        f"{took_us / 1e3:,.0f} ms",
        *ratios,
        str(degrees)[1:-1],
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.orders.groups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reduced", action="store_true", help="one case")
    args = parser.parse_args(argv)
    cases = [Case(name, ranks, seed) for ranks in (8, 16, 32) for name in DRAWS for seed in range(1 if ranks > 16 else 3)]
    rows = list(map(row, cases[:1] if args.reduced else cases))
    print(table(["lengths", "context parallel", "seed", "with groups", "over one degree", "over greedy", "degrees"], rows))
    return 0


if __name__ == "__main__":
    main()
