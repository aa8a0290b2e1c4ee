"""Trains with two settings, in the second of which a rank runs out of memory, and writes the time limits of each run's process
groups to a folder.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_epp.mcore import entry
from megatron_epp.runtime.links.objects import ObjectGroup
from tests.support.mcore.launch import PLANNED

LENGTHS = (60, 9, 33, 4, 21, 50, 2, 17, 41, 12, 7, 28)
VOCABULARY = 95
ITERATIONS = 3
FAULT_ITERATION = 2
LIMIT_MINUTES = 3

COMMON = PLANNED + shlex.split(
    f"--seq-length 64 --max-position-embeddings 64 --train-iters {ITERATIONS} --vocab-size {VOCABULARY} "
    f"--split 80,20,0 --eval-iters 1 --eval-interval 3 --epp-measure-memory --distributed-timeout-minutes {LIMIT_MINUTES}"
)
PIPELINE = "--pipeline-model-parallel-size 2 --epp-planner seq1f1b --epp-chunk-tokens 16 --hidden-dropout 0.1 "
PIPELINE += "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
PIPELINE += "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
PIPELINE += "--no-bias-gelu-fusion --disable-bias-linear"
REPLICAS = "--overlap-grad-reduce --use-distributed-optimizer --epp-slices 3 --hidden-dropout 0"
CASES = {"replicas": REPLICAS, "pipeline": PIPELINE}
FAILING_RANK = 1
"""Of the pipeline."""


def run(data: str, folder: Path) -> None:
    with entry.errors_in_one_line():
        entry.prepare()
        from scripts.parity.runs import record

        rank = int(os.environ["RANK"])
        for name, own in CASES.items():
            flags = [*COMMON, *shlex.split(own), "--data-path", data, "--epp-report-dir", str(folder / name)]
            with out_of_memory((name, rank) == ("pipeline", FAILING_RANK), folder / f"{name}-{rank}.json"):
                record(flags)


@contextlib.contextmanager
def out_of_memory(really: bool, limits: Path) -> Iterator[None]:
    """In the second backward of an iteration: behind its work, so that gradients have been added to by then. Writes the time
    limits of the run's process groups to a file, whether memory runs out or not.
    """
    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model.stage import MegatronStage

    backward = MegatronStage.backward
    count = 0

    def failing(self: MegatronStage, *args: Any) -> None:
        nonlocal count
        backward(self, *args)
        if sliced_run.current().iteration == FAULT_ITERATION:
            limits.write_text(json.dumps(limits_of(sliced_run.current())))
            count += 1
            if really and count == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")

    with mock.patch.object(MegatronStage, "backward", failing):
        yield


def limits_of(run: Any) -> dict[str, float]:
    """In seconds, by the name of each process group of a run."""
    held = {name: getattr(run.links, name) for name in type(run.links).__slots__} | vars(run)
    levels = {name: value.levels[0] for name, value in held.items() if isinstance(value, ObjectGroup) and value.levels}
    groups = {name: value for name, value in held.items() if isinstance(value, torch.distributed.ProcessGroup)} | levels
    backends = {name: group._get_backend(torch.device("cpu")) for name, group in groups.items()}
    return {name: backend.options._timeout.total_seconds() for name, backend in backends.items()}
