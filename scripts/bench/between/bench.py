"""Processor time that a rank takes for a plan between iterations: `python -m scripts.bench.between`.

Compares the message of the planning process (`PackedPlan`) with what it replaces: a plan file that is parsed, checked against
its digest and lowered on every rank. Then what a measurement of a run takes, with and without the digest that the message
brings. All of it holds the interpreter's lock, which the thread that launches kernels needs. The last row has the inputs of a
rank with the last stage (tokens, labels, masks, positions, segment tables), which a thread reads and packs while the iteration
before runs: from memory, and without the copy to a device.

The second table has the report of an iteration as every rank makes it, in processes that exchange their figures over gloo: if
the training thread made it itself, and as it is, in a thread of its own. Times of waiting are not in it: the training thread
would wait for the slowest rank, and on a GPU for the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from megatron_epp.cost import H100, analytic_costs
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.cost.slowness import SlowStages
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore.iteration.device_inputs import RankInputs
from megatron_epp.plan import UNLIMITED_BYTES, Plan, from_json, lower, to_json
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.service.packed import PackedPlan
from megatron_epp.report.measured import Measured
from megatron_epp.report.text import table
from megatron_epp.runtime.links.processes import run_ranks
from megatron_epp.runtime.upload import Uploader
from scripts.bench.between.ranks import COLUMNS, report_times_ms

ROUNDS = 9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=60, metavar="N", help="log-normal, up to 128K tokens (default: 60)")
    parser.add_argument("--stages", type=int, default=16, metavar="N", help="each on a rank of its own (default: 16)")
    args = parser.parse_args()
    plan = _plan(args.sequences, args.stages)
    packed, text = PackedPlan.of(plan, 0.0, ()), to_json(plan)
    events = [[(str(step.action), 0.0, step.time_us) for step in row] for row in plan.ranks]
    name = plan.num_ranks // 2
    took_us = [(step.action, step.time_us) for step in plan.ranks[name]]
    rows = {
        "plan and this rank's actions, from a plan file": lambda: lower(from_json(text))[name],
        "the same, from the planning process": lambda: (packed.plan(), packed.actions(name)),
        "measurement, digest computed": lambda: Measured.of(plan, events),
        "the same, digest from the planning process": lambda: Measured.of(plan, events, packed.plan_digest),
        "comparison of a rank with its costs": lambda: SlowStages().add(plan, name, took_us),
    }
    inputs, batch = RankInputs(Uploader(torch.device("cpu")), rows_of=lambda mask: None), _batch(plan)
    rows["inputs of the last stage's rank, in a thread"] = lambda: inputs.prepare(batch, packed.actions(plan.num_ranks - 1))
    num_bytes = len(packed.message) + sum(map(len, packed.rows))
    size = f"{len(plan.chunks)} chunks, {plan.num_stages} stages; a message of {num_bytes:,} bytes"
    print(f"{size}; {plan.num_tokens:,} tokens")
    cells = [[what, *(f"{ms:.1f}" for ms in _cpu_ms(work))] for what, work in rows.items()]
    print("\n".join(table(["", "CPU ms", "least", "most"], cells)))
    print(f"\nreports of {plan.num_ranks} ranks, CPU ms:")
    of_ranks = run_ranks(report_times_ms, plan.num_ranks, plan, packed.plan_digest)
    rows_of = {"first": of_ranks[0], "in the middle": of_ranks[name], "last": of_ranks[-1]}
    print("\n".join(table(["rank", *COLUMNS], [[at, *(f"{ms:.1f}" for ms in row)] for at, row in rows_of.items()])))


def _plan(num_sequences: int, num_stages: int) -> Plan:
    draw = np.random.RandomState(0)
    lengths = np.clip(draw.lognormal(8, 1.2, num_sequences), 16, 131072).astype(int).tolist()
    shape = replace(shape_of(load_flags("llama3-8b")), num_layers=2 * num_stages)
    costs = analytic_costs(shape, H100, [2] * num_stages, state_bytes_per_parameter=8.0)
    problem = Problem(tuple(lengths), tuple(range(num_stages)), (UNLIMITED_BYTES,) * num_stages)
    return plan(problem, costs, Options(steps=0))


class _Memory:
    """Sequences in memory, as int32."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = np.array(lengths)
        self._text = np.zeros(max(lengths) + 1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        return self._text[start:end]

    def trained(self, index: int, start: int, end: int) -> None:
        return None


def _batch(plan: Plan) -> GlobalBatch:
    return GlobalBatch(indices=tuple(range(len(plan.lengths))), lengths=plan.lengths, plan=plan, dataset=_Memory(plan.lengths))


def _cpu_ms(work: Callable[[], object]) -> tuple[float, float, float]:
    """Return the median, least and most processor time of this thread."""
    work()
    times = []
    for _ in range(ROUNDS):
        start_s = time.thread_time()
        work()
        times.append((time.thread_time() - start_s) * 1e3)
    return statistics.median(times), min(times), max(times)
