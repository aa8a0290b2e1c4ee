"""How plans change where the host's launches bound short actions: `python -m scripts.bench.host.plans`.

Plans batches of Llama 3 8B at several tensor-parallel sizes twice: with costs that know the time of launching, and with others
as if launching took no time. The plan that does not know of it is then timed with the costs that do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace

from megatron_epp.cost import Costs, Rates, analytic_profile, on_device
from megatron_epp.cost.library import balanced_layers, load_cluster, load_flags, shape_of
from megatron_epp.data import sequence_lengths
from megatron_epp.plan import Plan
from megatron_epp.planner import Options, Problem, plan, tabulate
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.report.text import table

MODEL, CLUSTER, STAGES, CAP_BYTES = "llama3-8b", "h100x8", 4, 72 << 30
STATE_BYTES = 7.5
"""Bytes of a parameter with its gradient and optimizer state, which replicas shard."""
TENSOR_PARALLEL = 1, 4, 8
LENGTHS = {
    "one of 32K": (32768,),
    "8 x 8K": (8192,) * 8,
    "64 Wikipedia, one of 32K": (32768, *sequence_lengths.wikipedia(64, 0).tolist()),
}


@dataclass(frozen=True, slots=True)
class Change:
    """Two plans of a batch.

    Attributes:
        batch: its name.
        tensor_parallel: ranks that share a layer.
        slices: of the longest sequence, without and with the time of launching.
        chunks: of the batch, without and with it.
        expected_us: makespan that the plan without it predicts.
        unaware_us: makespan of that plan with the time of launching.
        aware_us: makespan of the plan made with it.
    """

    batch: str
    tensor_parallel: int
    slices: tuple[int, int]
    chunks: tuple[int, int]
    expected_us: float
    unaware_us: float
    aware_us: float


def change(batch: str, tensor_parallel: int, rates: Rates) -> Change:
    """Plan a batch with and without the time of launching.

    Args:
        batch: a name in `LENGTHS`.
        tensor_parallel: ranks that share a layer.
    """
    lengths = LENGTHS[batch]
    problem = Problem(lengths, tuple(range(STAGES)), (CAP_BYTES,) * STAGES, token_multiple=tensor_parallel)
    unbound = replace(rates, launch_forward_us=0.0, launch_backward_us=0.0)
    costs, others = (_costs(hardware, tensor_parallel, lengths) for hardware in (rates, unbound))
    aware, unaware = plan(problem, costs), plan(problem, others)
    return Change(
        batch,
        tensor_parallel,
        (_slices(unaware), _slices(aware)),
        (len(unaware.chunks), len(aware.chunks)),
        unaware.predicted.makespan_us,
        _timed_us(unaware, problem, costs),
        aware.predicted.makespan_us,
    )


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


def lines(changes: list[Change]) -> list[str]:
    """Return the lines of the table, with times in milliseconds."""
    header = ["batch", "TP", "slices", "chunks", "as planned without", "as it would run", "planned with", "faster"]
    cells = [
        [
            change.batch,
            str(change.tensor_parallel),
            *(f"{before} to {after}" for before, after in (change.slices, change.chunks)),
            *(f"{us / 1e3:.1f}" for us in (change.expected_us, change.unaware_us, change.aware_us)),
            f"{change.unaware_us / change.aware_us - 1:.1%}",
        ]
        for change in changes
    ]
    return table(header, cells)


def main() -> None:
    """Print the table."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.host.plans", description=__doc__, formatter_class=about)
    rates = load_cluster(CLUSTER).rates
    for name in ("forward", "backward"):
        default = getattr(rates, f"launch_{name}_us")
        parser.add_argument(
            f"--{name}-us", type=float, default=default, help=f"time of launching a layer's {name} ({default:g})"
        )
    args = parser.parse_args()
    rates = replace(rates, launch_forward_us=args.forward_us, launch_backward_us=args.backward_us)
    print("\n".join(lines([change(batch, size, rates) for batch in LENGTHS for size in TENSOR_PARALLEL])))


if __name__ == "__main__":
    main()
