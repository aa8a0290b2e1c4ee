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

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
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
from megatron_epp.runtime.links.processes import run_ranks
from megatron_epp.runtime.upload import Uploader
from scripts.bench.between_ranks import COLUMNS, report_times_ms
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

ROUNDS = 9


def row(args: Namespace, sizes: tuple[int, int]) -> Figures:
    plan = _plan(*sizes)
    packed, message = PackedPlan.of(plan, 0.0, ()), to_json(plan)
    events = [[(str(step.action), 0.0, step.time_us) for step in steps] for steps in plan.ranks]
    rank, last = plan.num_ranks // 2, plan.num_ranks - 1
    took_us = [(step.action, step.time_us) for step in plan.ranks[rank]]
    inputs, batch = RankInputs(Uploader(torch.device("cpu")), rows_of=lambda mask: None), _batch(plan)
    work = {
        "plan and this rank's actions, from a plan file": lambda: lower(from_json(message))[rank],
        "the same, from the planning process": lambda: (packed.plan(), packed.actions(rank)),
        "measurement, digest computed": lambda: Measured.of(plan, events),
        "the same, digest from the planning process": lambda: Measured.of(plan, events, packed.plan_digest),
        "comparison of a rank with its costs": lambda: SlowStages().add(plan, rank, took_us),
        "inputs of the last stage's rank, in a thread": lambda: inputs.prepare(batch, packed.actions(last)),
    }
    cpu_ms = {what: _cpu_ms(function) for what, function in work.items()}
    reports_ms = run_ranks(report_times_ms, plan.num_ranks, plan, packed.plan_digest)
    return {
        "chunks": len(plan.chunks),
        "tokens": plan.num_tokens,
        "message_bytes": len(packed.message) + sum(map(len, packed.rows)),
        "cpu_ms": cpu_ms,
        "reports_ms": {"first": reports_ms[0], "in the middle": reports_ms[rank], "last": reports_ms[-1]},
    }


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    (row,) = rows
    size = f"{row['chunks']} chunks, {row['tokens']:,} tokens; a message of {row['message_bytes']:,} bytes"
    times, reports = (
        table(titles, [[name, *(f"{ms:.1f}" for ms in each)] for name, each in row[key].items()])
        for key, titles in (("cpu_ms", ["", "CPU ms", "least", "most"]), ("reports_ms", ["rank", *COLUMNS]))
    )
    return f"{size}\n\n{times}\n\nReports, CPU ms:\n\n{reports}"


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


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"{args.sequences} sequences on {args.stages} stages": (args.sequences, args.stages)},
    row=row,
    text=text,
    flags={
        "sequences": {"type": int, "default": 60, "metavar": "N", "help": "log-normal, up to 128K tokens (default: 60)"},
        "stages": {"type": int, "default": 16, "metavar": "N", "help": "each on a rank of its own (default: 16)"},
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
