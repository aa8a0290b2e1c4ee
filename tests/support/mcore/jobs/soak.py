"""Trains tiny iterations by Megatron's loop; records what Python has after some of them, or the processes that are left."""

import gc
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_epp.mcore import entry
from scripts.parity.runs import train
from tests.support.mcore.launch import CHOOSING, PLANNED

LONGEST, VOCABULARY = 64, 95


@dataclass(frozen=True)
class SoakCase:
    """Training run after some iterations of which all of Python's objects are counted, or tensors alone.

    Before each count it waits for the watchdog, which lets go of an iteration up to a second after its end.
    """

    iterations: int
    pipeline_size: int
    first: int
    window: int = 10
    counts_objects: bool = False

    @property
    def early(self) -> range:
        """Iterations of the first counts, when caches are full."""
        return range(self.first, self.first + self.window)

    @property
    def late(self) -> range:
        return range(self.iterations - self.window + 1, self.iterations + 1)

    @property
    def flags(self) -> list[str]:
        return PLANNED + shlex.split(
            f"--num-layers 2 --seq-length {LONGEST} --max-position-embeddings {LONGEST} --global-batch-size 2 "
            f"--train-iters {self.iterations} --pipeline-model-parallel-size {self.pipeline_size} "
            f"--vocab-size {VOCABULARY} --log-interval 10 --epp-slices 2"
        )


CASES = {"tensors": SoakCase(60, pipeline_size=1, first=11, window=4)}
CASES["objects"] = SoakCase(1000, pipeline_size=2, first=101, counts_objects=True)


def run(data: str, name: str) -> dict[str, Any]:
    entry.prepare()
    from megatron.training import training

    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model import gpt

    case = CASES[name]
    step, seen, done = training.train_step, {}, 0

    def count() -> int:
        while sliced_run.current().watchdog._activities:
            time.sleep(0.01)
        things = gc.get_objects()
        return len(things) if case.counts_objects else sum(issubclass(type(thing), torch.Tensor) for thing in things)

    def train_step(*args: Any, **named: Any) -> Any:
        nonlocal done
        answer = step(*args, **named)
        done += 1
        if done == case.early.start - 1:  # from here on cycles of references stay, too, and count
            gc.collect()
            gc.disable()
        if done in case.early or done in case.late:
            seen[done] = count()
        return answer

    training.train_step = train_step
    sys.argv = [sys.argv[0], *case.flags, "--data-path", data]
    gpt.pretrain()
    return {"counts": seen}


ITERATIONS = 6
FLAGS = CHOOSING + shlex.split(
    f"--seq-length 192 --max-position-embeddings 192 --global-batch-size 6 --train-iters {ITERATIONS} --vocab-size 255 "
    "--split 75,25,0 --eval-iters 1 --eval-interval 2 --epp-trace 3 --pipeline-model-parallel-size 2"
)


def left(data: str, folder: Path) -> None:
    entry.prepare()
    train([*FLAGS, "--data-path", data, "--epp-report-dir", str(folder)])
    processes = [child.cmdline() for child in psutil.Process().children(recursive=True)]
    (folder / f"left{os.environ['RANK']}").write_text("\n".join(map(str, processes)))
