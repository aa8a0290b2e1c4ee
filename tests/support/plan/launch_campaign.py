"""Seeded batches planned as training would, over everything that changes how ranks launch, and run by an independent machine.

python -m tests.support.plan.launch_campaign 2500 [--first-seed SEED] [--only-shards]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from megatron_epp.cost import PipelineCosts, on_device
from megatron_epp.cost.library import load_costs
from megatron_epp.plan import (
    UNLIMITED_BYTES,
    Action,
    InfeasibleError,
    Op,
    Plan,
    check,
    check_lockstep,
    lower,
    to_grid,
    to_json,
)
from megatron_epp.plan.check.deadlock import blocked
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.result import plan_lockstep
from tests.support.plan import second_simulator
from tests.support.plan.queue_machine import stuck_together

MACHINES = ((1, 0.0), (1, 0.1), (8, 0.1), (32, 0.0))
"""Hardware queues, and how likely a host waits for its device before a launch."""
LAYERS = 32


@cache
def costs_of(num_stages: int, shares: tuple[float, ...] = ()) -> PipelineCosts:
    """Costs of even stages, with the vocabulary on the last one or divided over the ranks by `shares`."""
    layers = [LAYERS // num_stages + (stage < LAYERS % num_stages) for stage in range(num_stages)]
    return on_device(load_costs("llama3-8b-h100").costs(layers, vocabulary_shares=shares))


def random_plans(seed: int, *, only_shards: bool = False) -> tuple[Plan, ...]:
    """A plan, or those of replicas that share experts; none where the batch fits no cap that was drawn.

    Args:
        only_shards: the vocabulary is always in shards, whose sizes and times differ; else in some plans, in equal shards.
    """
    rng = random.Random(seed)
    ranks, stages = rng.choice([2, 3, 4, 8]), rng.choice([1, 1, 2, 4])
    stages = 1 if LAYERS % (ranks * stages) else stages
    placement = Placement(rng.choice(["v", "looped"]) if stages > 1 else "looped", ranks, stages)
    is_long = rng.random() < 0.12  # then keys and values go to the host
    replicas = rng.choice([2, 3]) if rng.random() < 0.15 and not is_long else 1
    lengths = [_lengths(rng, is_long) for _ in range(replicas)]
    forward_only = rng.random() < 0.1
    problems = [Problem(each, placement.rank_of, (UNLIMITED_BYTES,) * ranks, forward_only=forward_only) for each in lengths]
    options = Options(
        split_weight=rng.random() < 0.4,
        offload=is_long or rng.random() < 0.4,
        slices=16 if is_long else rng.choice([None, 1, 3, 8]),
        planner=rng.choice(["1f1b", "seq1f1b", "1f1b-packed"]) if stages == replicas == 1 and rng.random() < 0.1 else "greedy",
    )
    costs = _costs(seed, placement, only_shards)
    try:
        made = _planned(problems, costs, options)
        if is_long or rng.random() < 0.6:  # a cap between what is held throughout and the peak: recompute, copies
            static, peak = (
                max(max(row) for row in rows)
                for rows in zip(*((p.static_bytes, p.predicted.peak_bytes) for p in made), strict=True)
            )
            cap = static + int((peak - static) * (0.1 if is_long else rng.choice([0.2, 0.5, 0.8])))
            problems = [replace(problem, cap_bytes=(cap,) * ranks) for problem in problems]
            made = _planned(problems, costs, options)
    except InfeasibleError:
        return ()
    return made


def _costs(seed: int, placement: Placement, only_shards: bool) -> PipelineCosts:
    rng, ranks = random.Random(f"shards of {seed}"), placement.num_ranks
    if not only_shards:
        return costs_of(placement.num_stages, (1 / ranks,) * ranks if rng.random() < 0.3 else ())
    parts = [rng.choice([1.0, 1.0, 1.1, 2.0]) for _ in range(ranks)]
    costs = costs_of(placement.num_stages, tuple(part / sum(parts) for part in parts))
    assert costs.vocabulary is not None
    factors = {name: rng.choice([0.0, 0.5, 1.0, 1.0, 8.0]) for name in ("logits", "gradient", "spread", "gather")}
    times = {name: getattr(costs.vocabulary, name).scaled(factor) for name, factor in factors.items()}
    return replace(costs, vocabulary=replace(costs.vocabulary, **times))


def _lengths(rng: random.Random, is_long: bool) -> tuple[int, ...]:
    short = tuple(min(65536, int(rng.lognormvariate(7.2, 1.3)) + 8) for _ in range(rng.choice([4, 8, 12])))
    return (1_000_000, *short[:3]) if is_long else short


def _planned(problems: list[Problem], costs: PipelineCosts, options: Options) -> tuple[Plan, ...]:
    if len(problems) > 1:
        return plan_lockstep(problems, costs, replace(options, planner="greedy"))
    return (plan(problems[0], costs, options),)


def faults_of(seed: int, *, only_shards: bool = False) -> list[str]:
    """Plan a random batch, check and simulate its plans, and run them on all machines."""
    plans = random_plans(seed, only_shards=only_shards)
    rows, lockstep = [lower(plan) for plan in plans], len(plans) > 1
    faults = [str(fault) for plan in plans for fault in (*check(plan), *second_simulator.faults(plan))]
    faults += map(str, check_lockstep(plans))
    faults += [f"blocked: {place}" for place in blocked(rows, lockstep)]
    texts = [(to_json(plan), to_grid(row)) for plan, row in zip(plans, rows, strict=True)]
    for queues, waits in MACHINES if plans else ():
        if left := stuck_together(texts, lockstep, queues, waits, seed):
            faults.append(f"{queues} queues, waits {waits}: {left} never end")
    return faults


def late_receives(rows: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Rows whose receives stand right before the actions that use them."""
    late = []
    for row in rows:
        receives = {Action(Op(a.op[-1]), a.stage, a.chunk): a for a in row if a.op in (Op.RECV_F, Op.RECV_B)}
        others = [a for a in row if a.op not in (Op.RECV_F, Op.RECV_B)]
        late.append([each for a in others for each in ((receives[a], a) if a in receives else (a,))])
    return late


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only-shards", action="store_true", help="all plans have the vocabulary in shards")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.count)
    faults = [f"seed {seed}: {fault}" for seed in seeds for fault in faults_of(seed, only_shards=args.only_shards)]
    print("\n".join([*faults, f"{len(faults)} faults"]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
