"""Trains in worlds of forked processes: what takes long to import is imported once, in the process that forks them.

A world runs one training after the other. Where one fails, the world ends and a new one goes on behind it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from parity_runs import Run, record

from megatron_epp.mcore import entry

_LATE = (  # what training imports when it is under way
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron_epp.mcore.elastic",
    "megatron_epp.mcore.gpt",
    "torch._dynamo",
)
_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Training:
    """One run of Megatron.

    Attributes:
        number: distinguishes it from the others of its folder.
        num_processes: that train together.
        flags: of Megatron.
        checkpoint: where to save one before the first step.
    """

    number: int
    num_processes: int
    flags: tuple[str, ...]
    checkpoint: Path | None = None

    def record_of(self, folder: Path, rank: int) -> Path:
        return folder / f"training{self.number}.rank{rank}.pt"


def load_megatron() -> None:
    """Import and patch all that a training needs. Processes forked later have it."""
    entry.prepare()
    for module in _LATE:
        importlib.import_module(module)


def train_all(trainings: Sequence[Training], folder: Path, limit_s: float) -> dict[int, list[Run] | str]:
    """Run every training and collect what its ranks saw.

    Args:
        trainings: in any order; those of as many processes share a world.
        folder: for records and logs, empty.
        limit_s: longest time a training may take.

    Returns:
        by number, the runs by rank, or the end of the log where it failed.
    """
    results: dict[int, list[Run] | str] = {}
    for size in sorted({t.num_processes for t in trainings}):
        left = [t for t in trainings if t.num_processes == size]
        while left:
            failure = _world(size, left, folder, limit_s)
            while left and (runs := _records(left[0], folder)) is not None:
                results[left.pop(0).number] = runs
            if left:
                results[left.pop(0).number] = failure or "its processes ended before it"
    return results


def _records(training: Training, folder: Path) -> list[Run] | None:
    paths = [training.record_of(folder, rank) for rank in range(training.num_processes)]
    if not all(path.exists() for path in paths):
        return None
    return [torch.load(path, weights_only=False) for path in paths]


def _world(size: int, trainings: Sequence[Training], folder: Path, limit_s: float) -> str | None:
    """Run the trainings one after the other. Returns the end of the failed process's log, if one fails."""
    log = folder / "world.log"
    log.unlink(missing_ok=True)
    processes = [_fork.Process(target=_serve, args=(rank, size, trainings, folder, log)) for rank in range(size)]
    for process in processes:
        process.start()
    progress, since_s = -1, time.monotonic()
    try:
        while any(process.is_alive() for process in processes):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], timeout=1.0)
            if any(process.exitcode for process in processes):
                return _end_of(log)
            done = sum(_finished(t, folder) for t in trainings)
            if done > progress:
                progress, since_s = done, time.monotonic()
            elif time.monotonic() - since_s > limit_s:
                return f"not finished after {limit_s:.0f} s\n{_end_of(log)}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return _end_of(log) if any(process.exitcode for process in processes) else None


def _finished(training: Training, folder: Path) -> bool:
    return all(training.record_of(folder, rank).exists() for rank in range(training.num_processes))


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-5000:]


def _serve(rank: int, size: int, trainings: Sequence[Training], folder: Path, log: Path) -> None:
    """A process of a world."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    try:
        for training in trainings:
            store = f"file://{folder}/store{training.number}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
            run = record(training.flags, training.checkpoint)
            dist.destroy_process_group()
            path = training.record_of(folder, rank)
            torch.save(run, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: the others wait for this process
    sys.stdout.flush()
    os._exit(0)
