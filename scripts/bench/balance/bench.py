"""Measurement of the balance between replicas: a global batch divided by predicted time, against division by count.

    python -m scripts.bench.balance                 all rows: lengths like Wikipedia's, code's and long chats', 2 to 8 replicas
    python -m scripts.bench.balance --reduced       a few rows

Imbalance is ``max / mean - 1`` of the replicas' planned makespans: the share of an iteration that replicas wait on average. Its
floor is what no division can go below, since sequences are not cut between replicas: the longest sequence's plan alone, or the
best that any division of the longest few achieves in work, however well the others fill the gaps. A row above both 2 % and its
floor by more than 2 % is marked: there replicas have so little to do that plans of equal work differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron_epp.data import sequence_lengths
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.estimate import estimate_us
from megatron_epp.planner.service.replica_balance import Division, by_count, divide, sequence_work
from scripts.bench.planner.suite import Case

CONTEXT, STAGES, MODEL, CAP_GB = 131072, 4, "llama3-8b", 80
KINDS = ("wikipedia", "code", "chat")
REPLICAS, BATCHES = (2, 4, 8), (64, 128, 256, 512)
GOAL = 0.02
HEAD = 10
"""Longest sequences of which all divisions are looked at."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.balance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reduced", action="store_true", help="a few rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    kinds, replicas, batches = (KINDS[:1], (2, 8), (64,)) if args.reduced else (KINDS, REPLICAS, BATCHES)
    print(f"{'lengths':>10} {'replicas':>8} {'batch':>6} {'by count':>9} {'by time':>9} {'floor':>7} {'ms':>6}")
    rows = []
    for kind in kinds:
        for count in replicas:
            for batch in batches:
                rows.append(row(kind, count, batch))
                print(line(rows[-1]), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


def row(kind: str, replicas: int, batch: int) -> dict[str, Any]:
    """All figures of one batch."""
    case = Case(kind, CONTEXT, STAGES, MODEL, CAP_GB)
    lengths = tuple(getattr(sequence_lengths, kind)(batch, seed=replicas + batch).clip(1, CONTEXT).tolist())
    problem = replace(case.problem, lengths=lengths)

    @cache
    def makespan_us(share: tuple[int, ...]) -> float:
        return plan(replace(problem, lengths=share), case.costs).predicted.makespan_us

    def estimated_us(shares: tuple[Problem, ...]) -> float:
        return estimate_us(shares[0], case.costs, Options())

    def planned(shares: Iterable[tuple[int, ...]]) -> Division:
        return Division((), tuple(makespan_us(tuple(lengths[at] for at in share)) for share in shares))

    start_s = time.perf_counter()
    shares = divide(problem, case.costs, tuple((r,) for r in range(replicas)), estimated_us).shares
    milliseconds = (time.perf_counter() - start_s) * 1e3
    division = planned(shares)
    mean_us = sum(division.makespan_us) / replicas
    alone = makespan_us((max(lengths),)) / mean_us - 1
    floor = max(0.0, alone, least_imbalance(sequence_work(problem, case.costs), replicas))
    return {
        "lengths": kind,
        "replicas": replicas,
        "batch": batch,
        "by_count": planned(by_count(batch, r, replicas) for r in range(replicas)).imbalance,
        "by_time": division.imbalance,
        "floor": min(floor, division.imbalance),  # work is not quite makespan
        "sequences": list(map(len, shares)),
        "milliseconds": milliseconds,
    }


def least_imbalance(work_us: Sequence[float], replicas: int) -> float:
    """Imbalance of work in the best division of the longest sequences, the others taken as divisible at will."""
    head, mean_us = sorted(work_us, reverse=True)[:HEAD], sum(work_us) / replicas
    best_us = sum(head)

    def assign(at: int, loads: tuple[float, ...]) -> None:
        nonlocal best_us
        if max(loads) >= best_us or best_us <= mean_us:
            return
        if at == len(head):
            best_us = max(loads)
            return
        for load in sorted(set(loads)):
            rest = list(loads)
            rest.remove(load)
            assign(at + 1, (load + head[at], *rest))

    assign(0, (0.0,) * replicas)
    return max(0.0, best_us / mean_us - 1)


def missed(figures: dict[str, Any]) -> bool:
    """True if the lengths allow a better balance than was found."""
    return bool(figures["by_time"] > max(GOAL, figures["floor"] + GOAL))


def line(figures: dict[str, Any]) -> str:
    shares = "  ".join(f"{figures[name]:{width}.1%}" for name, width in (("by_count", 8), ("by_time", 8), ("floor", 6)))
    where = f"{figures['lengths']:>10} {figures['replicas']:8} {figures['batch']:6}  {shares}"
    return f"{where} {figures['milliseconds']:6.0f}" + ("  above its floor" if missed(figures) else "")
