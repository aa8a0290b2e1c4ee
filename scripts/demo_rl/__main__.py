"""Runs the demonstration, and writes its figures and a page to look at into a folder. `scripts/demo_rl.sh` sets it up.

First 20 steps of GRPO by verl's own engine and loss with Megatron's Adam on four ranks (two stages, two replicas), by
Megatron's schedule and by plans: rewards, losses and weights are compared. Responses are random tokens of log-normal lengths,
in place of an engine that generates. Then one batch with a response longer than verl's token budget on two stages: whole, with
every layer recomputed, and in slices under a cap at which that is needed. Without verl only the second part is run, with an
imitation of its rule.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_epp.contrib.demos.rounds import OthersMeter, Rounds, doubt
from megatron_epp.launch.forked import Forks
from megatron_epp.launch.machine import machine
from megatron_epp.plan import Plan
from megatron_epp.plan.serialize import from_json, save
from megatron_epp.plan.units import format_bytes
from megatron_epp.report.gantt import save_picture, side_by_side
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.text import table
from scripts.demo_rl import engine as verl
from scripts.demo_rl import slices

RANKS = 4
"""Number of ranks in the first part."""
LIMIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bash scripts/demo_rl.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of GRPO in the first part (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind in the second part (default: 5)")
    parser.add_argument("--without-verl", action="store_true", help="run as where verl is not installed")
    parser.add_argument("--reduced", action="store_true", help="few steps and short samples: shows that it runs")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/demo_rl"), help="folder (default: %(default)s)")
    a = parser.parse_args()
    start_s = time.monotonic()
    folder: Path = a.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{machine()}", flush=True)
    ranks = Forks({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VERL_LOGGING_LEVEL": "ERROR"})
    figures: dict[str, Any] = {"machine": machine()}
    has_verl = verl.is_installed() and not a.without_verl
    if has_verl:
        figures["updates"] = updates(ranks, folder, 3 if a.reduced else a.steps)
    else:
        print(f"\n1. Left out: verl is not installed. `{verl.command()}` installs it.")
    figures["slices"] = sliced(ranks, folder, a.rounds, has_verl, slices.REDUCED if a.reduced else slices.SIZE)
    ranks.close()
    (folder / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\nTook {time.monotonic() - start_s:.0f} s. In {folder}: report.json; slices.json, the plan; and to look at")
    print("  update.html    the batch by both ways, as planned: open it in a browser\n  update.png     the same as a picture")


def run(ranks: Forks, folder: Path, count: int, module: str, environment: dict[str, str], *words: object) -> list[Any]:
    """Run a program on fresh ranks; return what they have written. Ends the process with the log's end if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    log.unlink(missing_ok=True)
    log.touch()
    command = ["-m", f"scripts.demo_rl.{module}", str(folder), *map(str, words)]
    code = ranks.run(count, command, environment, log, LIMIT_S)
    if code != 0:
        sys.exit(f"{log.read_text(errors='replace')[-3000:]}\nfailed with {code}: {log}")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(count)]


def updates(ranks: Forks, folder: Path, steps: int) -> dict[str, Any]:
    """Run and print the first part."""
    print(
        f"\n1. {steps} steps of GRPO by verl's engine, two stages and two replicas, with Megatron's schedule and with plans",
        flush=True,
    )
    steps_of = {
        name: run(ranks, folder / name, RANKS, "updates", environment, steps)
        for name, environment in (("stock", {"MEGATRON_EPP": ""}), ("plans", {"MEGATRON_EPP": "1"}))
    }
    log = (folder / "plans" / "log").read_text(errors="replace")
    planned = sum(" ms, bubble " in line and "while costs are learnt" not in line for line in log.splitlines())
    if not planned:
        sys.exit(f"no plan has run: {folder / 'plans' / 'log'}")
    first, second = steps_of["stock"], steps_of["plans"]

    def largest_difference(name: str) -> float:
        return max(
            abs(ours - theirs) / max(1e-6, abs(theirs))
            for step_of_plans, other in zip(second, first, strict=True)
            for row, wanted in zip(step_of_plans[name], other[name], strict=True)
            for ours, theirs in zip(row, wanted, strict=True)
        )

    weights = max(
        float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        for step_of_plans, other in zip(second, first, strict=True)
        for ours, theirs in zip(step_of_plans["weights"], other["weights"], strict=True)
    )
    last = first[-1]
    rows = [
        [
            str(step + 1),
            *(
                f"{sum(of[name][step]) / len(of[name][step]):.7f}"
                for of in (last, second[-1])
                for name in ("rewards", "losses")
            ),
        ]
        for step in sorted({0, 1, steps // 2, steps - 1})
    ]
    print("\n".join(table(("step", "reward, stock", "loss, stock", "reward, plans", "loss, plans"), rows, left=())))
    differences = {"rewards": largest_difference("rewards"), "losses": largest_difference("losses"), "weights": weights}
    listed = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(
        f"largest relative differences of all ranks and steps: {listed}; {planned} plans were made from learnt costs",
        flush=True,
    )
    return {"largest_relative_differences": differences, "plans": planned, "rewards": last["rewards"], "losses": last["losses"]}


def sliced(ranks: Forks, folder: Path, rounds: int, has_verl: bool, size: verl.Size) -> dict[str, Any]:
    """Run and print the second part."""
    lengths = slices.batch(size).lengths
    whose = "verl's microbatches" if has_verl else "an imitation of verl's microbatches"
    print(
        f"\n2. One update of {len(lengths)} samples of {min(lengths):,} to {max(lengths):,} tokens on two stages: {whose}, "
        "and slices"
    )
    print("(a minute or two)", flush=True)
    others = OthersMeter()
    with others.measured():
        results, *_ = run(ranks, folder / "slices", 2, "slices", {"MEGATRON_EPP": ""}, rounds, int(has_verl), size.longest)
    whole, plan = map(from_json, results["plans"])
    held = results["held_bytes"]
    every, fewer, none = held
    print(f"with a token budget of half the longest sample: {results['refusal']}")
    print(
        f"with a budget of {max(lengths):,} tokens: {format_bytes(held[none])} of activations; {format_bytes(held[fewer])} "
        f"with all but one layer of a stage recomputed, {format_bytes(held[every])} with every layer"
    )
    print(f"cap for slices: {format_bytes(results['cap_bytes'])}; they take {format_bytes(results['sliced_bytes'])}")
    mine, theirs = results["losses"]
    print(f"loss: {mine:.7f} whole, {theirs:.7f} in slices; gradients differ by {results['gradients']:.1e} of their norm")
    times = {name: Rounds(tuple(values)) for name, values in results["times_s"].items()}
    stated = whole.predicted.makespan_us / plan.predicted.makespan_us
    measured = times[slices.STOCK].median / times[slices.SLICES].median
    rows = [
        [
            name,
            f"{drawn.predicted.makespan_us / 1e6:.2f}",
            f"{times[name].median:.2f}",
            *(f"{edge:.2f}" for edge in times[name].range),
        ]
        for name, drawn in ((slices.STOCK, whole), (slices.SLICES, plan))
    ]
    print("\n".join(table(("", "planned, s", "measured, s", "least", "most"), rows)))
    reason = doubt(times[slices.STOCK], times[slices.SLICES], others.occupancy(2))
    least = times[slices.STOCK].range[0] / times[slices.SLICES].range[0]  # of which other programs have the smallest part
    ratios = f"the plan states {stated:.2f} times as fast, measured {measured:.2f}, by the least times {least:.2f}"
    print(f"{reason + ': ' if reason else ''}{ratios}", flush=True)
    _leave(folder, whole, plan)
    return {name: value for name, value in results.items() if name != "plans"} | {
        "stated": stated,
        "measured": measured,
        "by_least_times": least,
        "doubt": reason,
    }


def _leave(folder: Path, whole: Plan, plan: Plan) -> None:
    save(plan, folder / "slices.json")
    both = [("whole microbatches, 1F1B, every layer recomputed", whole), ("slices", plan)]
    save_page([Shown(*named_plan) for named_plan in both], folder / "update.html")
    save_picture(side_by_side(both), folder / "update.png")


if __name__ == "__main__":
    main()
