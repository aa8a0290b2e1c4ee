"""Plans random batches, compares each plan with a second simulator, and lets an independent machine run it.

python -m tests.support.plan.launch_campaign 2500 [--first-seed SEED] [--only-shards]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from megatron_epp.plan import Action, Op, check, check_lockstep, lower, to_grid, to_json
from megatron_epp.plan.check.deadlock import blocked
from tests.support.plan import second_simulator
from tests.support.plan.launch_plans import random_plans
from tests.support.plan.queue_machine import makespan_us, stuck_together

MACHINES = ((1, 0.0), (1, 0.1), (8, 0.1), (32, 0.0))
"""Hardware queues, and how likely a host waits for its device before a launch."""

Rows = Sequence[Sequence[Action]]


@dataclass
class Judgement:
    """Kinds of plans that a seed gave, what is wrong with them, and their time with one hardware queue over that planned."""

    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)


def judge(seed: int, *, only_shards: bool = False) -> Judgement:
    """Plan a random batch, check and simulate its plans, and run them on all machines."""
    plans, found = random_plans(seed, only_shards=only_shards), Judgement()
    rows = [lower(plan) for plan in plans]
    lockstep = len(plans) > 1
    for plan in plans:
        found.kinds["plans"] += 1
        found.kinds["several stages a rank"] += plan.num_stages > plan.num_ranks
        found.kinds["weight gradients split"] += any(step.action.op is Op.W for row in plan.ranks for step in row)
        found.kinds["vocabulary in shards"] += any(step.action.op is Op.S for row in plan.ranks for step in row)
        found.kinds["copies"] += any(plan.copies)
        found.kinds["KV offload"] += bool(plan.kv_offload)
        found.kinds["forward only"] += plan.forward_only
        found.kinds["in lockstep"] += lockstep
        found.faults += map(str, check(plan))
        found.faults += second_simulator.faults(plan)
    found.faults += map(str, check_lockstep(plans))
    found.faults += [f"blocked: {place}" for place in blocked(rows, lockstep)]
    texts = [(to_json(plan), to_grid(row)) for plan, row in zip(plans, rows, strict=True)]
    for queues, waits in MACHINES if plans else ():
        if left := stuck_together(texts, lockstep, queues, waits, seed):
            found.faults.append(f"{queues} queues, waits {waits}: {left} never end")
    if plans:
        took_us = makespan_us(*texts[0], queues=1)
        found.slower.append((took_us or math.inf) / plans[0].predicted.makespan_us)
        found.kinds["batches"] += 1
        found.kinds["hang where receives are posted right before their use"] += bool(
            stuck_together([(text, to_grid(late_receives(row))) for (text, _), row in zip(texts, rows, strict=True)], lockstep)
        )
    return found


def late_receives(rows: Rows) -> list[list[Action]]:
    """Rows whose receives stand right before the actions that use them."""
    late = []
    for row in rows:
        receives = {Action(Op(a.op[-1]), a.stage, a.chunk): a for a in row if a.op in (Op.RECV_F, Op.RECV_B)}
        others = [a for a in row if a.op not in (Op.RECV_F, Op.RECV_B)]
        late.append([each for a in others for each in ((receives[a], a) if a in receives else (a,))])
    return late


def main(count: int, seed: int = 0, only_shards: bool = False) -> int:
    """Judge seeds, from `seed` on, until so many plans are judged; how many faults there were."""
    kinds, slower, faults = Counter[str](), list[float](), 0
    while kinds["plans"] < count:
        found = judge(seed, only_shards=only_shards)
        kinds += found.kinds
        slower += found.slower
        faults += len(found.faults)
        for fault in found.faults:
            print(f"seed {seed}: {fault}")
        seed += 1
        if seed % 100 == 0:
            print(f"{seed} seeds, {kinds['plans']} plans, {faults} faults", flush=True)
    for kind, number in kinds.items():
        print(f"{number:6,} {kind}")
    print(f"{faults:6,} faults")
    print(f"time with one hardware queue over time planned: {fmean(slower):.4f} in the mean, {max(slower):.4f} at most")
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, help="number of plans")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only-shards", action="store_true", help="all plans have the vocabulary in shards")
    args = parser.parse_args()
    sys.exit(bool(main(args.count, args.first_seed, args.only_shards)))
