"""Idle time of the best schedules there are, against 1F1B and zero-bubble schedules with the same memory.

    python -m scripts.bench.exact                     4 to 8 ranks with as many microbatches as ranks
    python -m scripts.bench.exact --ranks 4 --microbatches 6

OptPipe (arXiv 2510.05186) states that exact schedules halve the idle time. Here F, B and W of a microbatch take one unit each
on a rank, messages take none, activations stay until W, and recompute is left out. The memory is that of 1F1B, as many
microbatches as ranks, and half of it. With copies, moving all activations of a microbatch on a rank to host memory takes
`--copy` units, and as long back. An entry is the idle time of a rank in units; with ``<`` the solver ran out of time, and the
lower bound follows in brackets.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_epp.contrib.exact.oracle import oracle
from megatron_epp.cost import PipelineCosts
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options, Problem, for_table
from scripts.bench.orders.unit import TOKENS, Unit
from scripts.bench.planner.report import table

SCHEDULES = ("1f1b-sliced", "zb-h1", "zb-v")
"""The first is the baseline. An exact plan has the placement of one of the others."""

Row = dict[str, Any]


def row(ranks: int, microbatches: int, memory: float, limit_s: float, copy_units: float, workers: int) -> Row:
    """Compute a line of the table.

    Args:
        limit_s: seconds for each solve.
        copy_units: time of copying a microbatch's activations to host memory, in units.
    """
    figures: Row = {"ranks": ranks, "microbatches": microbatches, "memory": memory}
    for name in SCHEDULES:
        unit = Unit(name, ranks, microbatches)
        decisions = unit.of_paper()
        figures[name] = [unit.waits(decisions)] * 2 if unit.peak_bytes(decisions) <= memory * TOKENS else None
    zb_h1, two = Unit("zb-h1", ranks, microbatches), Unit("zb-v", ranks, microbatches)
    for name, unit, options in (
        ("greedy", zb_h1, Options(split_weight=True)),
        ("greedy, V", two, Options(split_weight=True)),
        ("exact", zb_h1, Options(split_weight=True)),
        ("exact, V", two, Options(split_weight=True)),
        ("exact, V, copies", two, Options(split_weight=True, offload=True)),
    ):
        figures[name] = _idle(unit, memory, options, None if name.startswith("greedy") else limit_s, copy_units, workers)
    return figures


def _idle(
    unit: Unit, memory: float, options: Options, limit_s: float | None, copy_units: float, workers: int
) -> list[float] | None:
    """Idle time of the best plan and its lower bound, in units; None where nothing fits. No solver without a limit."""
    costs: PipelineCosts = unit.costs
    if options.offload:
        costs = replace(costs, host_latency_us=0.0, host_us_per_byte=copy_units, offloadable_share=1.0)
    problem = replace(unit.problem, cap_bytes=(int(memory * TOKENS),) * unit.problem.num_ranks)
    start = _start(unit, problem, costs, options)
    if start is None:
        return None
    if limit_s is None:
        times_us = [start.makespan_us(problem, costs)] * 2
    else:
        best = oracle(unit.chunks, problem, costs, options, start=start, time_limit_s=limit_s, workers=workers)
        times_us = [best.makespan_us, best.makespan_us if best.optimal else best.bound_us]
    return [time_us / TOKENS - 3 * unit.microbatches for time_us in times_us]


def _start(unit: Unit, problem: Problem, costs: PipelineCosts, options: Options) -> Any:
    try:
        return for_table(unit.chunks, problem, costs, options)
    except InfeasibleError:
        return None


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Format the rows, with the share of 1F1B's idle time that the best exact plan saves."""
    names = [name for name in rows[0] if name not in ("ranks", "microbatches", "memory")]
    yield ["ranks", "microbatches", "memory", *names]
    for figures in rows:
        yield [
            str(figures["ranks"]),
            str(figures["microbatches"]),
            f"{figures['memory']:g}",
            *(_entry(figures[name]) for name in names),
        ]


def _entry(idle: Sequence[float] | None) -> str:
    if idle is None:
        return "no plan"
    best, bound = idle
    return f"{best:.3g}" if best == bound else f"< {best:.3g} ({bound:.3g})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 5, 6, 7, 8])
    parser.add_argument("--microbatches", type=int, help="of the pipeline (default: as many as ranks)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each solve (default: %(default)s)")
    parser.add_argument(
        "--copy", type=float, default=1.0, help="units to copy a microbatch's activations (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="threads of the solver (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, after each line")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for ranks in args.ranks:
        for memory in (ranks, ranks / 2):
            count = args.microbatches or ranks
            rows.append(row(ranks, count, memory, args.limit_s, args.copy, args.workers))
            print(rows[-1], flush=True)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    head, *body = lines(rows)
    print(table(head, body))
