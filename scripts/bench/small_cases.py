"""How far the default planner is from the best plan there is: random small cases, solved exactly.

    python -m scripts.bench.small_cases --seeds 0:200 --json runs/small_cases.json

Llama 3 8B with costs by formulas for H100s, on 2 to 4 ranks with one or two stages each, sequences of lengths like Wikipedia's,
a cap 1.02 to 2 times the least, with weight gradients split off in half of the cases and offload in a third. Cases with more
than 24 actions a rank, copies not counted, are drawn again. The exact planner takes greedy's chunks, and chooses order,
recompute, weight gradients and copies. The gap is greedy's makespan over the optimum, less 1; cases whose optimum is not proven
in time are counted, and have no gap. Cases that the file has are planned again, and solved again if greedy's chunks differ.
"""

from __future__ import annotations

import hashlib
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from megatron_epp.contrib.exact.oracle import oracle
from megatron_epp.cost.model import Costs
from megatron_epp.data import sequence_lengths
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.message_room import with_room
from megatron_epp.planner.result import greedy
from scripts.bench.frame import Bench, Figures
from scripts.bench.orders.orders import LAYERS, costs_of
from scripts.bench.planner.suite import least_cap_bytes

MOST_ACTIONS = 24
CONTEXTS = (4096, 16384, 65536)
TIGHTEST, WIDEST = 1.02, 2.0
"""Caps as multiples of the least."""


def drawn(seed: int) -> tuple[Problem, Costs, Options]:
    """Draw ranks, stages, lengths, cap and options, until there are few enough actions."""
    random = np.random.RandomState(seed)
    while True:
        ranks, chunks = int(random.choice((2, 3, 4))), int(random.choice((1, 1, 2)))
        kind: Literal["looped", "v"] = "v" if random.rand() < 0.5 else "looped"
        layout = Layout(even_layers(LAYERS, ranks * chunks), Placement(kind if chunks > 1 else "looped", ranks, chunks))
        whole = sequence_lengths.wikipedia(int(random.randint(2, 9)), int(random.randint(1 << 30)))
        lengths = tuple(np.minimum(whole, int(random.choice(CONTEXTS))).tolist())
        options = Options(split_weight=bool(random.rand() < 0.5), offload=bool(random.rand() < 1 / 3))
        costs = costs_of(layout, max(lengths))
        problem = Problem(lengths, layout.placement.rank_of, (1,) * ranks)
        share = float(np.exp(random.uniform(np.log(TIGHTEST), np.log(WIDEST))))
        problem = replace(problem, cap_bytes=(int(share * least_cap_bytes(problem, costs, options)),) * ranks)
        candidate = plan(problem, costs, options)
        if len(candidate.chunks) * chunks * (3 if options.split_weight else 2) <= MOST_ACTIONS:
            return problem, costs, options


def row(args: Namespace, seed: int) -> Figures:
    """Return greedy's makespan and the best one of a case, with its bound: of an earlier result if chunks and caps are its."""
    problem, costs, options = drawn(seed)
    known: Figures = args.known.get(str(seed), {})
    begin_s = time.perf_counter()

    def solve(asked: Problem) -> Figures:
        start = greedy(asked, costs, options)
        greedy_us = build_plan(asked, costs, options, start).predicted.makespan_us
        case = hashlib.sha256(repr((asked, start.chunks)).encode()).hexdigest()[:12]
        figures = {"digest": case, "greedy_us": greedy_us, "chunks": len(start.chunks)}
        if known.get("digest") == case:
            best_us = min(greedy_us, known["best_us"])
            return figures | {"best_us": best_us, "bound_us": known["bound_us"], "solved_s": known["solved_s"]}
        best = oracle(start.chunks, asked, costs, options, start=start, time_limit_s=args.limit_s)
        seconds = round(time.perf_counter() - begin_s, 1)
        return figures | {"best_us": best.makespan_us, "bound_us": best.bound_us, "solved_s": seconds}

    about = {"seed": seed, "ranks": problem.num_ranks, "stages": problem.num_stages}
    return about | {"split_weight": options.split_weight, "offload": options.offload} | with_room(problem, solve)


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Return how many cases are proven, and their gaps."""
    proven = [row for row in rows if row["bound_us"] >= row["best_us"] * (1 - 1e-4)]
    said = f"{len(rows)} cases, {len(proven)} proven"
    if proven:
        gaps = sorted((row["greedy_us"] / row["best_us"] - 1, row["seed"]) for row in proven)
        mean = sum(gap for gap, _ in gaps) / len(gaps)
        worst = ", ".join(f"{gap:.2%} (seed {seed})" for gap, seed in gaps[:-4:-1])
        said += f"; greedy above the optimum: mean {mean:.2%}, worst {worst}"
    return said


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {str(seed): seed for seed in range(*map(int, args.seeds.split(":")))},
    row=row,
    text=text,
    flags={
        "seeds": {"default": "0:200", "metavar": "FIRST:END", "help": "seeds to solve (default: %(default)s)"},
        "limit-s": {"type": float, "default": 60.0, "help": "seconds for each case (default: %(default)s)"},
    },
    resumes=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
