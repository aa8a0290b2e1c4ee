"""Trains a tiny GPT for thousands of iterations on two CPU processes and measures how its processes' memory grows.

Elastic plans and Megatron's own schedule train on the same documents, one after the other, as `megatron-epp train` starts them.
Memory is sampled from outside. A line is fitted by least squares to each process's samples after the first iterations, in which
memory pools, caches and torch's flight recorder fill. Most documents are as long as the context, so the largest batch comes
early, too. On a GPU tensors are not on the heap of malloc; here they are mapped one by one instead, unless `--heap` is given:
holes between tensors of ever other sizes would count, and hide smaller growth. Prints a table, draws a picture, and returns 1
if a process of elastic plans grows faster than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_epp.cli.train import quietly
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.report.gantt import new_figure, save_picture
from megatron_epp.report.text import table
from scripts.soak.samples import Sample, growth_bytes, sampled, training_command

LIMIT_KB = 1.0
"""Most growth of a process per iteration, in KB."""
_DOCUMENTS, _CONTEXT = 4001, 256
"""Number of documents, which no batch size divides, and tokens of the longest sequence."""
_AFTERWARDS = 100
"""Iterations after the last that counts, so that all processes are there when it is sampled."""
_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""Variables of glibc's malloc with which tensors are mapped one by one, and unmapped when they are freed."""
_INCHES, _DPI = (9.0, 3.0), 100
_KB, _MB = 1024, 1024**2

Soak = Mapping[str, Sequence[Sample]]
"""Samples of every training, by its schedule."""


def main(argv: list[str] | None = None) -> int:
    """Train with every schedule and report; return 1 if a process of elastic plans grows by more than `LIMIT_KB`."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--iterations", type=int, default=5000, help="iterations of each training (default 5000)")
    parser.add_argument("--skip", type=int, default=500, help="iterations at the start that do not count (default 500)")
    parser.add_argument("--every", type=int, default=100, help="iterations from one sample to the next (default 100)")
    parser.add_argument(
        "--schedules", nargs="+", choices=("elastic", "stock"), default=["elastic", "stock"], help="trainings (default: both)"
    )
    parser.add_argument("--heap", action="store_true", help="keep tensors on malloc's heap, whose holes count then, too")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/soak"), help="folder (default runs/soak)")
    args = parser.parse_args(argv)
    with quietly():
        from scripts.random_documents import write_documents
    lengths = wikipedia(_DOCUMENTS, seed=1).clip(max=_CONTEXT - 1)
    data = write_documents(args.output / "documents", lengths.tolist())
    soak: dict[str, list[Sample]] = {}
    environment = {**os.environ, **({} if args.heap else _MAPPED), "CUDA_VISIBLE_DEVICES": ""}
    at = range(args.every, args.iterations + 1, args.every)
    for schedule in args.schedules:
        command = training_command(args.output / schedule, data, args.iterations + _AFTERWARDS, schedule, _CONTEXT)
        soak[schedule] = []
        for sample in sampled(command, args.output / f"{schedule}.log", at, environment):
            soak[schedule].append(sample)
            print(f"  {schedule}: iteration {sample.iteration} of {args.iterations}", flush=True)
            (args.output / "samples.json").write_text(json.dumps(soak), encoding="utf-8")
    print("\n".join(rows_of(soak, args.skip)))
    draw(soak, args.output / "memory.png")
    return int(max(growths_kb(soak, args.skip).get("elastic", {}).values(), default=0.0) > LIMIT_KB)


def growths_kb(soak: Soak, skip: int) -> dict[str, dict[str, float]]:
    """Return the growth of each process's anonymous memory in KB per iteration, by schedule and role."""
    return {
        schedule: {role: growth_bytes(samples, role, skip).anonymous / _KB for role in samples[-1].memory}
        for schedule, samples in soak.items()
    }


def rows_of(soak: Soak, skip: int) -> list[str]:
    """Format a table with a row per process.

    Args:
        skip: number of iterations at the start that do not count.
    """
    rows = []
    for schedule, samples in soak.items():
        first = next(sample for sample in samples if sample.iteration >= skip)
        for role, last in samples[-1].memory.items():
            growth = growth_bytes(samples, role, skip)
            ends = [f"{memory.anonymous / _MB:.1f}" for memory in (first.memory[role], last)]
            growths = [f"{num_bytes / _KB:.2f}" for num_bytes in (growth.anonymous, growth.unique, growth.resident)]
            rows.append([schedule, role, *ends, *growths])
    header = ("schedule", "process", f"MB at {skip}", "MB at the end", "KB per iteration", "of USS", "of RSS")
    return table(header, rows, left=(0, 1))


def draw(soak: Soak, path: Path) -> None:
    """Draw each process's anonymous memory over iterations, in MB above its first sample, one training below the other."""
    width, height = _INCHES
    figure, axes = new_figure((width, height * len(soak)), _DPI, len(soak), sharey=True)
    for (schedule, samples), axis in zip(soak.items(), axes, strict=True):
        for role in samples[-1].memory:
            mb = [sample.memory[role].anonymous / _MB for sample in samples]
            axis.plot([sample.iteration for sample in samples], [now - mb[0] for now in mb], label=role)
        axis.set_title(f"{schedule}: growth of anonymous memory (MB)", loc="left")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("iteration")
    save_picture(figure, path)
