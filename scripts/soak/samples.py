"""Memory of the processes of a training, sampled from outside while it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil  # type: ignore[import-untyped,unused-ignore]

from megatron_epp.launch.runs import ITERATION, reason_in
from megatron_epp.plan.errors import EppError
from megatron_epp.planner.service import worker

_READINGS, _PAUSE_S = 10, 0.02
"""Readings of a process's memory for a sample, and seconds from one to the next: tensors come and go within an iteration."""


class Memory(NamedTuple):
    """Memory of a process, in bytes.

    Attributes:
        resident: in physical memory (RSS), pages that are shared with other processes included.
        unique: what would be free if the process ended (USS): files count as long as no other process has mapped them.
        anonymous: in physical memory, of no file: what the process has allocated. Other programs do not change it.
    """

    resident: int
    unique: int
    anonymous: int


class Sample(NamedTuple):
    """Memory of all processes of a training after an iteration, by their roles (`roles_of`)."""

    iteration: int
    memory: Mapping[str, Memory]


def sampled(command: Sequence[str], log: Path, at: range, environment: Mapping[str, str]) -> Iterator[Sample]:
    """Run a training and yield a sample whenever its log reports one of some iterations.

    Args:
        command: becomes the launcher, which starts the ranks.
        at: the iterations, after the last of which training goes on for a while: its processes must be there.

    Raises:
        EppError: the training failed.
    """
    with (
        open(log, "w", encoding="utf-8") as output,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env={**environment}
        ) as process,
    ):
        assert process.stdout is not None
        launcher = psutil.Process(process.pid)
        try:
            for line in process.stdout:
                output.write(line)
                if (match := ITERATION.search(line)) and (iteration := int(match[1])) in at:
                    output.flush()
                    yield Sample(iteration, least_memory(roles_of(launcher)))
        except BaseException:
            process.terminate()  # the launcher ends its ranks
            raise
    if process.returncode:
        reason = reason_in(log.read_text(encoding="utf-8"))
        raise EppError(f"training ended with exit code {process.returncode}, see {log}" + (f": {reason}" if reason else ""))


def roles_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a training by role: the launcher, its ranks, and each rank's planner."""
    processes = {"launcher": launcher}
    for rank in launcher.children():
        name = f"rank {rank.environ().get('RANK', rank.pid)}"
        processes[name] = rank
        for child in rank.children():
            if any(worker.__name__ in word for word in child.cmdline()):
                processes[f"planner of {name}"] = child
    return processes


def least_memory(processes: Mapping[str, psutil.Process]) -> dict[str, Memory]:
    """Return the least memory of each process in some readings, of which one is likely to be between two iterations."""
    least: dict[str, Memory] = {}
    for _ in range(_READINGS):
        for role, process in processes.items():
            now = process.memory_full_info()
            read = Memory(now.rss, now.uss, now.rss - now.shared)
            least[role] = Memory(*map(min, read, least.get(role, read)))
        time.sleep(_PAUSE_S)
    return least


def growth_bytes(samples: Sequence[Sample], role: str, skip: int) -> Memory:
    """Return the growth of a process's memory in bytes per iteration, rounded: least-squares fit of a line.

    Args:
        role: of the process, which every sample has.
        skip: number of iterations at the start that do not count: memory pools and caches fill.

    Raises:
        EppError: fewer than two samples count.
    """
    counted = [sample for sample in samples if sample.iteration >= skip]
    if len(counted) < 2:
        raise EppError(f"{len(counted)} samples after iteration {skip} are too few: train longer")
    iterations = [sample.iteration for sample in counted]
    columns = zip(*(sample.memory[role] for sample in counted), strict=True)
    return Memory(*(round(float(np.polyfit(iterations, column, 1)[0])) for column in columns))


def training_command(folder: Path, data: str, iterations: int, schedule: str, context: int) -> list[str]:
    """Return the command of a user that trains ``recipes/tiny-cpu``, which logs every iteration, with a shorter context.

    Args:
        schedule: value of `--epp-schedule`.
        context: tokens of the longest sequence.
    """
    settings = {
        "launch.folder": folder,
        "data_path": data,
        "train_iters": iterations,
        "seq_length": context,
        "max_position_embeddings": context,
        "epp.schedule": schedule,
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-u", "-m", "megatron_epp.cli.main", "train", "-c", "recipes/tiny-cpu", *words]
