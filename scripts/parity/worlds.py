"""Trains in worlds of forked processes: what takes long to import is imported once, in the process that forks them.

A world runs one training after the other. Where one fails, the world ends and a new one goes on behind it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_epp.mcore.pinned import preload
from scripts.parity.planner import share_planner
from scripts.parity.runs import Run, record

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Training:
    """One run of Megatron.

    Attributes:
        num_processes: that train together.
        flags: of Megatron.
        checkpoint: where to save one before the first step.
    """

    num_processes: int
    flags: tuple[str, ...]
    checkpoint: Path | None = None


def load_megatron() -> None:
    """Import and patch all that a training needs. Processes forked later have it."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron_epp").setLevel(logging.WARNING)
    preload()
    share_planner()


def train_all(trainings: Iterable[Training], folder: Path, limit_s: float) -> dict[Training, list[Run] | str]:
    """Run every training once and collect what its ranks saw.

    Args:
        trainings: smaller worlds go first; worlds of a size keep this order.
        folder: for records and logs, empty.
        limit_s: longest time a training may take.

    Returns:
        the runs by rank, or the end of the log where it failed.
    """
    results: dict[Training, list[Run] | str] = {}
    left = sorted(dict.fromkeys(trainings), key=lambda t: t.num_processes)
    while left:
        folder = Path(tempfile.mkdtemp(dir=folder))
        world = [t for t in left if t.num_processes == left[0].num_processes]
        failure = _run_world(world, folder, limit_s)
        for number, training in enumerate(world):
            if not _is_recorded(number, training, folder):
                results[training] = failure or "its processes ended before it"
                break
            paths = _records(number, training, folder)
            results[training] = [torch.load(path, weights_only=False) for path in paths]
        left = [t for t in left if t not in results]
    return results


def _records(number: int, training: Training, folder: Path) -> list[Path]:
    return [folder / f"training{number}.rank{rank}" for rank in range(training.num_processes)]


def _is_recorded(number: int, training: Training, folder: Path) -> bool:
    return all(path.exists() for path in _records(number, training, folder))


def _run_world(trainings: Sequence[Training], folder: Path, limit_s: float) -> str | None:
    """Run the trainings one after the other. Returns the end of the log, if one fails."""
    log = folder / "log"
    processes = [_fork.Process(target=_serve, args=(rank, trainings, folder)) for rank in range(trainings[0].num_processes)]
    for process in processes:
        process.start()
    done, since_s = 0, time.monotonic()
    try:
        while (alive := [p for p in processes if p.is_alive()]) and not any(p.exitcode for p in processes):
            wait([process.sentinel for process in alive], timeout=1.0)
            if (now_done := sum(_is_recorded(i, t, folder) for i, t in enumerate(trainings))) > done:
                done, since_s = now_done, time.monotonic()
                print(f"{len(processes)} processes: {done} of {len(trainings)} runs", file=sys.stderr)
            elif time.monotonic() - since_s > limit_s:
                return f"not finished after {limit_s:.0f} s\n{_end_of(log)}"
        return _end_of(log) if any(process.exitcode for process in processes) else None
    finally:
        for process in processes:
            _end(process)


def _end(process: BaseProcess) -> None:
    """End a process and all that it has started: saving a checkpoint leaves a process behind."""
    with contextlib.suppress(ProcessLookupError):  # it has not made its group yet, or nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-5000:]


def _serve(rank: int, trainings: Sequence[Training], folder: Path) -> None:
    """A process of a world."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgrp()
    output = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    size = trainings[0].num_processes
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    try:
        for number, training in enumerate(trainings):
            dist.init_process_group("gloo", init_method=f"file://{folder}/store{number}", rank=rank, world_size=size)
            run = record(training.flags, training.checkpoint)
            dist.destroy_process_group()
            path = _records(number, training, folder)[rank]
            unfinished = path.with_name(f"{path.name}.part")
            torch.save(run, unfinished)
            unfinished.rename(path)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once, for the others wait for this process
    sys.stdout.flush()
    os._exit(0)
