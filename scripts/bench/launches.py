"""How plans change where the host's launches bound short actions: `python -m scripts.bench.launches`.

Plans batches of Llama 3 8B at several tensor-parallel sizes twice: with costs that know the time of launching, and with others
as if launching took no time. The plan that does not know of it is then timed with the costs that do.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost import Costs, Rates, analytic_profile, on_device
from megatron_epp.cost.library import balanced_layers, load_cluster, load_flags, shape_of
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import Plan
from megatron_epp.planner import Options, Problem, plan, tabulate
from megatron_epp.planner.evaluate import makespan_us
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

MODEL, CLUSTER, STAGES, CAP_BYTES = "llama3-8b", "h100x8", 4, 72 << 30
STATE_BYTES = 7.5
"""Bytes of a parameter with its gradient and optimizer state, which replicas shard."""
TENSOR_PARALLEL = 1, 4, 8
LENGTHS = {
    "one of 32K": (32768,),
    "8 x 8K": (8192,) * 8,
    "64 Wikipedia, one of 32K": (32768, *sequence_lengths.wikipedia(64, 0).tolist()),
}


def row(args: Namespace, case: tuple[str, int]) -> Figures:
    """Plan a batch with and without the time of launching."""
    batch, tensor_parallel = case
    lengths, rates = LENGTHS[batch], load_cluster(CLUSTER).rates
    bound, unbound = (
        replace(rates, launch_forward_us=forward_us, launch_backward_us=backward_us)
        for forward_us, backward_us in ((args.forward_us, args.backward_us), (0.0, 0.0))
    )
    problem = Problem(lengths, tuple(range(STAGES)), (CAP_BYTES,) * STAGES, token_multiple=tensor_parallel)
    costs, others = (_costs(hardware, tensor_parallel, lengths) for hardware in (bound, unbound))
    unaware, aware = plan(problem, others), plan(problem, costs)
    return {
        "batch": batch,
        "tensor_parallel": tensor_parallel,
        "slices": [_slices(unaware), _slices(aware)],
        "chunks": [len(unaware.chunks), len(aware.chunks)],
        "expected_us": unaware.predicted.makespan_us,
        "unaware_us": _timed_us(unaware, problem, costs),
        "aware_us": aware.predicted.makespan_us,
    }


def _costs(rates: Rates, tensor_parallel: int, lengths: tuple[int, ...]) -> Costs:
    ranks = {"tensor_model_parallel_size": tensor_parallel, "sequence_parallel": tensor_parallel > 1}
    shape = shape_of(load_flags(MODEL) | ranks | {"seq_length": max(lengths)})
    profile = analytic_profile(shape, rates)
    layers = balanced_layers(profile, shape.num_layers, STAGES, lengths)
    return on_device(profile.costs(layers, state_bytes_per_parameter=STATE_BYTES))


def _slices(plan: Plan) -> int:
    """Return the most slices of a sequence."""
    return max(Counter(sequence for chunk in plan.chunks for sequence, *_ in chunk.segments).values())


def _timed_us(timed_plan: Plan, problem: Problem, costs: Costs) -> float:
    """Return the makespan of a plan with other costs than it was made with, without copies to the host."""
    tables = tabulate(timed_plan.chunks, problem, costs, Options().modes(costs))
    steps = [
        [tables.num_steps(stage, c, recompute) for c, recompute in enumerate(row)]
        for stage, row in enumerate(timed_plan.recompute)
    ]
    order = [[action for step in row for action in step.actions] for row in timed_plan.ranks]
    return makespan_us(order, tables, steps)


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format the plans, with times in milliseconds."""
    cells = []
    for row in rows:
        counts = ["{} to {}".format(*row[key]) for key in ("slices", "chunks")]
        times = [f"{row[key] / 1e3:.1f}" for key in ("expected_us", "unaware_us", "aware_us")]
        faster = f"{row['unaware_us'] / row['aware_us'] - 1:.1%}"
        cells.append([row["batch"], row["tensor_parallel"], *counts, *times, faster])
    titles = ["batch", "TP", "slices", "chunks", "as planned without", "as it would run", "planned with", "faster"]
    return table(titles, cells)


def flags() -> dict[str, Figures]:
    rates = load_cluster(CLUSTER).rates
    defaults = {"forward": rates.launch_forward_us, "backward": rates.launch_backward_us}
    return {
        f"{name}-us": {"type": float, "default": us, "help": f"time of launching a layer's {name} (default: %(default)g)"}
        for name, us in defaults.items()
    }


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"{batch}, TP {size}": (batch, size) for batch in LENGTHS for size in TENSOR_PARALLEL},
    row=row,
    text=text,
    flags=flags(),
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
