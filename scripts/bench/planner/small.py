"""The planner against the oracle, on random small cases under tight caps.

What the oracle found is kept in a file, so that a run can go on where another ended, and so that a changed planner is judged
in seconds: the oracle's answers depend on the case alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import islice
from math import exp, log
from pathlib import Path
from typing import Any

from megatron_epp.contrib.exact.oracle import Proven, oracle
from megatron_epp.cost import H100, ModelShape, PipelineCosts, analytic_costs
from megatron_epp.plan import Chunk, InfeasibleError, Plan, PlanError
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, Problem, plan
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.tabulate import tabulate

FEATURES: dict[str, dict[str, bool]] = {
    "plain": {},
    "weights": {"split_weight": True},
    "copies": {"split_weight": True, "offload": True},
}
"""Decisions besides order and recompute."""
MOST_CHUNKS = 8
"""With weight gradients of their own, 24 actions a rank."""
SAME = 1e-5
"""Makespans closer than this, relative, are the same to the oracle."""

Row = dict[str, Any]


@dataclass(frozen=True)
class SmallCase:
    """One batch, under a cap between a third and all of what its chunks keep without recompute."""

    number: int
    features: str
    problem: Problem
    costs: PipelineCosts
    slices: int
    chunks: tuple[Chunk, ...]

    @property
    def options(self) -> Options:
        return Options(slices=self.slices, recompute_modes="full", **FEATURES[self.features])

    def key(self, chunks: tuple[Chunk, ...]) -> str:
        """Digest of all inputs of the oracle."""
        text = f"{self.features} {self.problem} {self.costs.to_json()} {chunks}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def small_cases(features: str, most: int, seed: int = 0) -> Iterator[SmallCase]:
    """Random cases, one after another, the same every time; most: chunks times stages."""
    draw = random.Random(seed)
    number = 0
    while True:
        stages = draw.choice((2, 3, 4))
        shape = ModelShape(
            num_layers=4 * stages,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_attention_heads=32,
            num_query_groups=8,
            vocab_size=draw.choice((4096, 32000)),
        )
        costs = analytic_costs(shape, H100, [4] * stages, state_bytes_per_parameter=4.0)
        lengths = tuple(int(exp(draw.uniform(log(500), log(30000)))) for _ in range(draw.randint(1, 6)))
        slices, tightness = draw.randint(1, 5), draw.uniform(0.35, 0.95)
        free = Problem(lengths, tuple(range(stages)), (UNLIMITED_BYTES,) * stages)
        chunker = Chunker.of(free, costs, None)
        chunks = chunker.table(chunker.grain(slices=slices))
        if not 2 <= len(chunks) <= MOST_CHUNKS or len(chunks) * stages > most:
            continue
        tables = tabulate(chunks, free, costs)
        peaks = peaks_bytes(elastic_1f1b(chunks, stages, False), tables, [[0] * len(chunks)] * stages)
        static = max(tables.static)
        cap = static + int((max(peaks) - static) * tightness)
        yield SmallCase(number, features, replace(free, cap_bytes=(cap,) * stages), costs, slices, chunks)
        number += 1


def judge(case: SmallCase, limit_s: float, known: dict[str, Row]) -> Row:
    """The planner's makespan and what the oracle says, anew only where nothing is known or more time may tell more."""
    began_s = time.process_time()
    made: Plan | None
    try:
        made = plan(case.problem, case.costs, case.options)
    except InfeasibleError:
        made = None
    chunks = case.chunks if made is None else made.chunks
    facts = {"number": case.number, "features": case.features, "stages": case.problem.num_stages, "chunks": len(chunks)}
    key = case.key(chunks)
    ours_us = None if made is None else made.predicted.makespan_us
    row = known.get(key)
    if row is None or (not row["settled"] and row["limit_s"] < limit_s):
        row = _asked(case, chunks, made, limit_s)
    if ours_us is not None and (row["best_us"] is None or ours_us < row["best_us"]):
        refuted = row["bound_us"] is None or ours_us < row["bound_us"] * (1 - SAME)
        row = row | {"best_us": ours_us, "contradicted": row["settled"] and refuted}
    return facts | row | {"key": key, "ours_us": ours_us, "cpu_s": time.process_time() - began_s}


def _asked(case: SmallCase, chunks: tuple[Chunk, ...], made: Plan | None, limit_s: float) -> Row:
    start = None
    if made is not None:
        actions = tuple(map(made.actions, range(made.num_ranks)))
        start = Decisions(
            made.chunks,
            actions,
            [[again.full for again in row] for row in made.recompute],
            copies=tuple(tuple((copy.action, copy.after) for copy in row) for row in made.copies),
            offload=made.offload_share if any(made.copies) else (),
            kv_offload=frozenset((entry.stage, entry.sequence) for entry in made.kv_offload),
        )
    empty: Row = {"best_us": None, "bound_us": None, "settled": True, "contradicted": False, "limit_s": limit_s}
    try:
        found: Proven = oracle(chunks, case.problem, case.costs, case.options, start=start, time_limit_s=limit_s)
    except InfeasibleError:
        return empty
    best_us = None if found.decisions is None else found.makespan_us
    return empty | {"best_us": best_us, "bound_us": found.bound_us, "settled": found.optimal}


def small(count: int, limit_s: float, most: int, features: Iterable[str], jobs: int, store: Path, first: int = 0) -> Row:
    """The figures of so many cases with each of the features.

    Args:
        count: of cases.
        limit_s: for the oracle, each case, on the clock.
        most: chunks times stages.
        features: names in `FEATURES`.
        jobs: processes.
        store: JSON of what is known of single cases; read first, written after each case.
        first: number of the first case.
    """
    known: dict[str, Row] = json.loads(store.read_text()) if store.exists() else {}
    found: Row = {"time_limit_s": limit_s, "most_chunks_times_stages": most, "features": {}}
    for name in features:
        cases = list(islice(small_cases(name, most), first, first + count))
        rows: list[Row] = []
        try:
            for row in _judged(cases, limit_s, known, jobs):
                rows.append(row)
                known[row["key"]] = row
                _write(store, known)
                _say(row, len(rows), count)
        except PlanError as error:  # no solver
            return {"skipped": str(error)}
        found["features"][name] = figures(rows)
    return found


def _judged(cases: list[SmallCase], limit_s: float, known: dict[str, Row], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from (judge(case, limit_s, known) for case in cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge, case, limit_s, known) for case in cases]):
            yield done.result()


def figures(rows: list[Row]) -> Row:
    """Gaps of the planner: to the optimum where that is proven, else to the bound that is.

    `at_most` takes both together: no gap to the optimum is larger.
    """
    both = [row for row in rows if row["ours_us"] is not None and row["bound_us"] is not None]
    proven = [row["ours_us"] / row["best_us"] - 1 for row in both if row["settled"]]
    open_ = [row for row in both if not row["settled"]]
    to_bound = [row["ours_us"] / row["bound_us"] - 1 for row in open_]
    without = [row for row in rows if row["ours_us"] is None]
    return {
        "cases": len(rows),
        "compared": len(both),
        "proven": _gaps(proven),
        "not_proven": _gaps(to_bound) | {"to_best": _gaps([row["ours_us"] / row["best_us"] - 1 for row in open_])},
        "at_most": _gaps(proven + to_bound),
        "infeasible_for_both": sum(row["settled"] and row["best_us"] is None for row in without),
        "infeasible_for_the_planner_alone": sum(row["best_us"] is not None for row in without),
        "undecided": sum(not row["settled"] and row["best_us"] is None for row in without),
        "contradicted": sum(row["contradicted"] for row in rows),
    }


def _gaps(gaps: list[float]) -> Row:
    return {"cases": len(gaps), "mean_gap": statistics.fmean(gaps) if gaps else None, "worst_gap": max(gaps, default=None)}


def _write(store: Path, known: dict[str, Row]) -> None:
    store.parent.mkdir(parents=True, exist_ok=True)
    part = store.with_suffix(".part")
    part.write_text(json.dumps(known, indent=0) + "\n")
    part.replace(store)


def _say(row: Row, done: int, count: int) -> None:
    ours_us, bound_us = row["ours_us"], row["bound_us"]
    gap = "no plan" if ours_us is None else f"gap {ours_us / (row['best_us'] if row['settled'] else bound_us) - 1:.2%}"
    proof = "proven" if row["settled"] else "to the bound"
    case = f"small, {row['features']}: {done} of {count}, {row['chunks']} chunks on {row['stages']} stages"
    print(f"{case}: {gap}, {proof}, {row['cpu_s']:.1f} s of processor", file=sys.stderr, flush=True)
