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
import sys

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
    gains = []
    for recipe in (recipe for recipe in RECIPES if recipe.name in args.only):
        print(f"{recipe.name}: {recipe.title}", file=sys.stderr, flush=True)
        gains.append(gain_of(recipe, advises=not args.no_advice))
    print("\n".join(json.dumps(as_json(gain)) for gain in gains) if args.json else "\n".join(rows_of(gains)))
