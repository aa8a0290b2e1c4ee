"""Measures what KV offload is worth, on paper: makespans of one long sequence, and the longest that fits.

One sequence alone, cut into slices, on a pipeline of one rank per stage. Everything is planned, nothing is trained; costs are
analytic, and makespans are the simulator's. Every context is planned with recompute alone, with offload of activations, and
with KV offload as well.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.plan import Plan
from megatron_epp.plan.kv_offload import host_peak_bytes
from megatron_epp.plan.problem import Lengths, Options, Problem
from megatron_epp.tools.formulas import analytic_profile, on_device
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster, load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.suite import fitting
from scripts.tables import table

GIB, K = 1 << 30, 1 << 10
MODEL, CLUSTER, REPLICAS = "llama3-8b", "h100x8", 8
HOST_GIB, SLICES = 200, 256
"""Host memory of a rank, and slices of the longest sequence that is looked for."""
LONGEST = "longest"
VARIANTS = {
    "recompute": Options(),
    "offload": Options(offload=True, kv_offload=False),
    "offload, KV offload": Options(offload=True),
}


def costs_of(stages: int, tokens: int) -> PipelineCosts:
    shape = shape_of(load_flags(MODEL) | {"tensor_model_parallel_size": 1, "seq_length": tokens})
    profile = analytic_profile(shape, load_cluster(CLUSTER).rates)
    layers = balanced_layers(profile, shape.num_layers, stages, [Lengths((tokens,))])
    optimizer = OptimizerBytes.of_flags({"data_parallel_size": REPLICAS}, profile.weight_bytes)
    return on_device(profile.costs(layers, optimizer=optimizer))


def planned(args: Namespace, tokens: int, options: Options) -> Plan | None:
    caps = (args.cap_gb * GIB,) * args.stages
    problem = Problem((tokens,), tuple(range(args.stages)), caps, host_cap_bytes=HOST_GIB * GIB)
    return fitting(problem, costs_of(args.stages, tokens), options)


def figures(plan: Plan | None) -> Figures | None:
    if plan is None:
        return None
    return {
        "makespan_s": plan.predicted.makespan_us / 1e6,
        "above_bound": plan.predicted.makespan_us / plan.predicted.lower_bound_us - 1,
        "chunks": len(plan.chunks),
        "kv_offload_stages": len(plan.kv_offload),
        "copies": sum(map(len, plan.copies)),
        "host_gib": max(host_peak_bytes(plan)) / GIB,
    }


def longest(args: Namespace, options: Options) -> int:
    """Tokens of the longest sequence that fits: from the last context that does, in steps of a quarter of it."""
    options, low = replace(options, slices=SLICES), 0
    for tokens in args.contexts:
        low = tokens * K if planned(args, tokens * K, options) else low
    step = max(low // 4, 1)
    while low and planned(args, low + step, options):
        low += step
    return low


def row(args: Namespace, tokens: int) -> Figures:
    if not tokens:
        return {name: longest(args, options) for name, options in VARIANTS.items()}
    return {name: figures(planned(args, tokens, options)) for name, options in VARIANTS.items()}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    def cell(of: Figures | int | None) -> str:
        if isinstance(of, int):
            return f"{of // K}K"
        return "no plan" if of is None else f"{of['makespan_s']:.1f} s, {of['host_gib']:.0f} GiB"

    title = f"{MODEL} on {args.stages} stages of {args.cap_gb} GB, {HOST_GIB} GB in host memory"
    lines = table(["context", *VARIANTS], [[row["case"], *(cell(row[name]) for name in VARIANTS)] for row in rows])
    return f"# {title}\n\nMakespan, and most in host memory of a rank.\n\n{lines}"


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"{k}K": k * K for k in args.contexts} | ({LONGEST: 0} if args.longest else {}),
    row=row,
    text=text,
    flags={
        "stages": {"type": int, "default": 8},
        "cap-gb": {"type": int, "default": 80, "help": "device memory of a rank (default: 80)"},
        "contexts": {"type": int, "nargs": "+", "default": [512, 1024, 2048], "metavar": "K"},
        "longest": {"action": "store_true", "help": "look for the longest sequence too"},
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
