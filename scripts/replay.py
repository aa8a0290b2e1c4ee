"""Proves that a change leaves plans as they are: digests of random plans over all planners and options, before and after.

    python -m scripts.replay before.json                    on the tree without the change: writes digests of 1,000 cases
    python -m scripts.replay before.json --compare          on the tree with it: plans again, and lists what differs
    python -m scripts.replay before.json --compare --first 100

Cases are the campaign's (`tests/support/plan/campaign_cases.py`), each tenth of them planned for three replicas in lockstep. A
refusal counts by its kind and the least cap that it names. The exact planner is left out: its plans depend on the machine.
Takes a few minutes; the exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from megatron_epp.plan import EppError, InfeasibleError, Plan, to_json
from megatron_epp.planner.result import plan_lockstep
from tests.support.plan.campaign_cases import case_of, planned

CASES = 1000
"""About half of them have a plan; the others are refused, many on purpose."""
LOCKSTEP = 10
"""Each such number of cases has one of replicas in lockstep."""


def digest_of(seed: int) -> str:
    """Plan the case of a seed and return the digests of its plans, or what a refusal says."""
    case = case_of(seed)
    try:
        if seed % LOCKSTEP:
            plans: Sequence[Plan] = [planned(case)]
        else:
            lengths = case.problem.lengths
            batches = (lengths, lengths[: max(1, len(lengths) // 2)], tuple(1 + length * 2 // 3 for length in lengths))
            problems = [replace(case.problem, lengths=batch) for batch in batches]
            plans = plan_lockstep(problems, case.costs, replace(case.options, planner="greedy", overlap_exchanges=False))
    except InfeasibleError as error:
        return f"infeasible, least cap {error.least_cap_bytes}"
    except EppError as error:
        return f"refused: {type(error).__name__}"
    return " ".join(json.loads(to_json(plan))["digest"] for plan in plans)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON file of digests by seed")
    parser.add_argument("--compare", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--first", type=int, default=CASES, metavar="N", help=f"plan N cases (default {CASES})")
    parser.add_argument("--start", type=int, default=0, metavar="SEED", help="begin with this case (default 0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes that plan (default 2)")
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(args.jobs) as pool:
        seeds = range(args.start, args.start + args.first)
        digests = dict(zip(seeds, pool.map(digest_of, seeds, chunksize=5), strict=True))
    plans = sum(not digest.startswith(("infeasible", "refused")) for digest in digests.values())
    print(f"{len(digests)} cases: {plans} plans, {len(digests) - plans} refusals")
    if not args.compare:
        args.file.write_text(json.dumps(digests, indent=0) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    differing = [seed for seed, digest in digests.items() if before[str(seed)] != digest]
    for seed in differing:
        print(f"seed {seed}: {before[str(seed)]}  ->  {digests[seed]}")
    print(f"{len(differing)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
