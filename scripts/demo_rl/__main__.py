"""Steps of GRPO by verl's own engine, with Megatron's schedule and with plans. `scripts/demo_rl.sh` sets it up.

verl's engine and loss with Megatron's Adam train on four ranks, two stages and two replicas, by Megatron's schedule and by
plans: rewards, losses and weights are compared. Responses are random tokens of log-normal lengths, in place of an engine that
generates.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from megatron_epp.tools.launch.runs import torchrun
from scripts.bench.frame import RUNS, Bench, Figures
from scripts.demo_rl import engine as verl
from scripts.tables import table

RANKS = 4
LIMIT_S = 600.0
SCHEDULES = {"stock": {"MEGATRON_EPP": ""}, "plans": {"MEGATRON_EPP": "1"}}
"""Environment of both trainings: the variable with which verl's plugin installs plans."""
ON_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "VERL_LOGGING_LEVEL": "ERROR"}
REDUCED_STEPS = 3


def row(args: Namespace, steps: int) -> Figures:
    """Take steps by both schedules; return rewards and losses of the last rank, and how far plans are off on any."""
    stock, plans = (trained(args, name, steps) for name in SCHEDULES)
    log = (args.output / "plans" / "log").read_text(errors="replace")
    count = sum(" ms, bubble " in line and "while costs are learnt" not in line for line in log.splitlines())
    if not count:
        raise SystemExit(f"no plan has run: {args.output / 'plans' / 'log'}")
    differences = {name: largest_difference(stock, plans, name) for name in ("rewards", "losses", "weights")}
    last = {name: {of: rank[of] for of in ("rewards", "losses")} for name, rank in (("stock", stock[-1]), ("plans", plans[-1]))}
    return {"steps": steps, "plans": count, "largest_relative_differences": differences, "last_rank": last}


def trained(args: Namespace, name: str, steps: int) -> list[dict[str, Any]]:
    """Take the steps by a schedule on fresh ranks; return what each has written. Raises SystemExit with the log's end."""
    folder = args.output.resolve() / name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    log.unlink(missing_ok=True)
    words = ["-m", "scripts.demo_rl.updates", str(folder), str(steps)]
    code = torchrun(RANKS, words, ON_CPU | SCHEDULES[name], log, LIMIT_S)
    if code != 0:
        raise SystemExit(f"{log.read_text(errors='replace')[-3000:]}\nfailed with {code}: {log}")
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def largest_difference(stock: Sequence[dict[str, Any]], plans: Sequence[dict[str, Any]], name: str) -> float:
    """Return the largest relative difference of a figure of any step, or of a weight by its norm, from Megatron's schedule."""
    pairs = (
        (torch.as_tensor(ours).flatten(), torch.as_tensor(theirs).flatten())
        for rank, other in zip(plans, stock, strict=True)
        for ours, theirs in zip(rank[name], other[name], strict=True)
    )
    if name == "weights":
        return max(float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12)) for ours, theirs in pairs)
    return max(float(((ours - theirs).abs() / theirs.abs().clamp(min=1e-6)).max()) for ours, theirs in pairs if len(theirs))


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    (row,) = rows
    lines = []
    for step in sorted({0, 1, row["steps"] // 2, row["steps"] - 1}):
        of_step = (row["last_rank"][schedule][name][step] for schedule in SCHEDULES for name in ("rewards", "losses"))
        lines.append([step + 1, *(f"{sum(values) / len(values):.7f}" for values in of_step)])
    differences = ", ".join(f"{name} {value:.1e}" for name, value in row["largest_relative_differences"].items())
    means = table(["step", "reward, stock", "loss, stock", "reward, plans", "loss, plans"], lines)
    said = f"Largest relative differences of all ranks and steps: {differences}"
    return f"{means}\n\n{said}; {row['plans']} plans were made from learnt costs"


def cases(args: Namespace) -> dict[str, int]:
    if not verl.is_installed():
        raise SystemExit(f"verl is not installed: `{verl.command()}` installs it")
    return {"updates": REDUCED_STEPS if args.reduced else args.steps}


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=row,
    text=text,
    flags={"steps": {"type": int, "default": 20, "help": "steps of GRPO (default: 20)"}},
    reduced="few steps: shows that it runs",
    folder=RUNS / "demo_rl",
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
