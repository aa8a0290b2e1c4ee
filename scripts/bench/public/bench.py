"""Public measurements and recipes of training next to plans of the same.

steps    measured steps of several models and machines, planned with their sizes and recompute: how far times by formula are off
recipes  recipes as they ship and in their best packing, next to plans at their sizes, and at those that `advise` finds for the
         same devices and memory

Nothing is fitted to them.

    python -m scripts.bench.public steps
    python -m scripts.bench.public recipes --only dapo-7b kimi-k2
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from scripts.bench.public.gains import as_json, gain_of, rows_of
from scripts.bench.public.recipes import RECIPES
from scripts.bench.public.rows import ROWS
from scripts.bench.public.steps import compared
from scripts.bench.public.steps import rows_of as rows_of_steps

NAMES = [recipe.name for recipe in RECIPES]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.public", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("steps", "recipes"), help="what is compared")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"recipes: {', '.join(NAMES)}")
    parser.add_argument("--no-advice", action="store_true", help="do not search sizes for recipes")
    parser.add_argument("--jobs", type=int, default=2, help="recipes that are compared at a time (default: 2)")
    parser.add_argument("--json", action="store_true", help="print figures as JSON, a line for each row")
    args = parser.parse_args(argv)
    if args.part == "steps":
        steps = [compared(row) for row in ROWS]
        if not args.json:
            print("\n".join(rows_of_steps(steps)))
            return
        for step in steps:
            figures = {"planned_s": step.planned_s, "again_s": step.again_s, "error": step.error}
            print(json.dumps({"row": step.row.number, "name": step.row.name, "measured_s": step.row.measured_s} | figures))
        return
    chosen = [recipe for recipe in RECIPES if recipe.name in args.only]
    with ProcessPoolExecutor(min(args.jobs, len(chosen))) as pool:
        gains = list(pool.map(partial(gain_of, advises=not args.no_advice), chosen))
    print("\n".join(map(json.dumps, map(as_json, gains)) if args.json else rows_of(gains)))
