"""Measures the planner: how fast it plans, how far its plans are from the best, and how they compare with other planners'.

Everything is planned, nothing is trained: all planners share costs (analytic) and caps, makespans are the simulator's. Parts
(`--only`): `speed` of planning; plans of single batches (`tuned`), for each of which other planners are tuned; and runs of
several batches (`runs`), for which other planners have one setting. `--reduced` runs a bit of everything in seconds.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.formulas import H100, analytic_costs
from megatron_epp.tools.formulas.library import load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.bench.planner.report import RUNS, SPEED, TUNED, text
from scripts.bench.planner.runs import RunCase, run_row
from scripts.bench.planner.suite import OURS, RIVALS, name_of, row, sampled_cases

SIZES = (512, 16), (1024, 16), (1024, 32), (2048, 32), (4096, 64)


def speed(sequences: int, stages: int, repeats: int) -> Figures:
    """Processor time of planning a wikipedia-like batch."""
    shape = replace(shape_of(load_flags("llama3-8b")), num_layers=2 * stages)
    costs = analytic_costs(shape, H100, [2] * stages, state_bytes_per_parameter=7.5)
    problem = Problem(tuple(wikipedia(sequences, 0).tolist()), tuple(range(stages)), (141 << 30,) * stages)
    times, chunks = [], None
    for _ in range(repeats + 1):
        start_s = time.process_time()
        try:
            chunks = len(plan(problem, costs, Options(planner=OURS)).chunks)
        except InfeasibleError:
            chunks = None
        times.append((time.process_time() - start_s) * 1e3)
    return {"sequences": sequences, "stages": stages, "chunks": chunks, "planning_ms": min(times[1:] or times)}


def cases(args: Namespace) -> dict[str, Callable[[], Figures]]:
    suite = sampled_cases()
    if args.reduced:
        suite = [case for case in suite if case.stages == 4 and case.context <= 131072 and case.cap_gb < 100][:1]
    sizes, repeats = (((64, 4), (128, 4)), 0) if args.reduced else (SIZES, 3)
    return (
        {f"{SPEED}: {sequences} on {stages} stages": partial(speed, sequences, stages, repeats) for sequences, stages in sizes}
        | {f"{TUNED}: {name_of(case)}": partial(row, case, RIVALS) for case in suite}
        | {f"{RUNS}: {name_of(case)}": partial(run_row, RunCase(*astuple(case))) for case in suite}
    )


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=lambda args, case: case(),
    text=text,
    reduced="a few small cases",
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
