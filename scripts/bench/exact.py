"""Idle time of the best schedules there are, against 1F1B and zero-bubble schedules with the same memory.

    python -m scripts.bench.exact                     4 to 8 ranks with as many microbatches as ranks
    python -m scripts.bench.exact --ranks 4

OptPipe (arXiv 2510.05186) states that exact schedules halve the idle time. Here F, B and W of a microbatch take one unit each
on a rank, messages take none, activations stay until W, and recompute is left out. The memory is that of 1F1B, as many
microbatches as ranks, and half of it. With copies, moving all activations of a microbatch on a rank to host memory takes a
unit, and as long back. An entry is the idle time of a rank in units; with ``<`` the solver ran out of time, and the
lower bound follows in brackets.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.contrib.exact.oracle import oracle
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options
from megatron_epp.planner.fitted import for_table
from scripts.bench.frame import Bench, Figures
from scripts.bench.orders.unit import TOKENS, Unit
from scripts.tables import table

SCHEDULES = ("1f1b-sliced", "zb-h1", "zb-v")
"""The first is the baseline. An exact plan has the placement of one of the others."""
COPY = 1.0
"""Units to copy a microbatch's activations."""

Case = tuple[int, float]
"""Ranks, and memory in microbatches."""


def row(args: Namespace, case: Case) -> Figures:
    ranks, memory = case
    figures: Figures = {"ranks": ranks, "microbatches": ranks, "memory": memory}
    for name in SCHEDULES:
        unit = Unit(name, ranks, ranks)
        decisions = unit.of_paper()
        figures[name] = [unit.waits(decisions)] * 2 if unit.peak_bytes(decisions) <= memory * TOKENS else None
    zb_h1, two = Unit("zb-h1", ranks, ranks), Unit("zb-v", ranks, ranks)
    for name, unit, offload in (
        ("greedy", zb_h1, False),
        ("greedy, V", two, False),
        ("exact", zb_h1, False),
        ("exact, V", two, False),
        ("exact, V, copies", two, True),
    ):
        figures[name] = _idle(args, unit, memory, offload, solves=name.startswith("exact"))
    return figures


def _idle(args: Namespace, unit: Unit, memory: float, offload: bool, solves: bool) -> list[float] | None:
    """Idle time of the best plan and its lower bound, in units; None where nothing fits."""
    costs, options = unit.costs, Options(split_weight=True, offload=offload)
    if offload:
        costs = replace(costs, host_latency_us=0.0, host_us_per_byte=COPY, offloadable_share=1.0)
    problem = replace(unit.problem, cap_bytes=(int(memory * TOKENS),) * unit.problem.num_ranks)
    try:
        start = for_table(unit.chunks, problem, costs, options)
    except InfeasibleError:
        return None
    if solves:
        best = oracle(unit.chunks, problem, costs, options, start=start, time_limit_s=args.limit_s, workers=1)
        times_us = [best.makespan_us, best.makespan_us if best.optimal else best.bound_us]
    else:
        times_us = [start.makespan_us(problem, costs)] * 2
    return [time_us / TOKENS - 3 * unit.microbatches for time_us in times_us]


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    names = [name for name in rows[0] if name not in ("case", "seconds")]
    return table(names, [[f"{row['memory']:g}" if name == "memory" else _entry(row[name]) for name in names] for row in rows])


def _entry(idle: Sequence[float] | int | None) -> str:
    if idle is None or isinstance(idle, int):
        return "no plan" if idle is None else str(idle)
    best, bound = idle
    return f"{best:.3g}" if best == bound else f"< {best:.3g} ({bound:.3g})"


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {f"{r} ranks, {m:g}": (r, m) for r in args.ranks for m in (float(r), r / 2)},
    row=row,
    text=text,
    flags={
        "ranks": {"type": int, "nargs": "+", "default": [4, 5, 6, 7, 8]},
        "limit-s": {"type": float, "default": 60.0, "help": "for each solve (default: %(default)s)"},
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
