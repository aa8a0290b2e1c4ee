"""Trains with named settings, in one of which a rank runs out of memory, and writes the time
limits of each run's process groups to a folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_epp.mcore import entry

LENGTHS = (60, 9, 33, 4, 21, 50, 2, 17, 41, 12, 7, 28)
VOCABULARY = 95
ITERATIONS = 3
FAULT_ITERATION = 2
LIMIT_MINUTES = 3

COMMON = shlex.split(
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    f"--transformer-impl local --micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 1e-3 "
    f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 "
    "--position-embedding-type learned_absolute --attention-dropout 0 --split 80,20,0 --eval-iters 1 --eval-interval 3 "
    "--log-interval 1 --calculate-per-token-loss --epp --epp-measure-memory "
    f"--distributed-timeout-minutes {LIMIT_MINUTES}"
)
PIPELINE = (
    "--pipeline-model-parallel-size 2 --epp-planner seq1f1b --epp-chunk-tokens 16 --hidden-dropout 0.1 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--no-bias-gelu-fusion --disable-bias-linear"
)
REPLICAS = "--overlap-grad-reduce --use-distributed-optimizer --epp-slices 3 --hidden-dropout 0"


class Case(NamedTuple):
    """Flags of a run, and the rank that runs out."""

    flags: str
    fails: int | None = None


CASES = {
    "pipeline": Case(PIPELINE),
    "replicas": Case(REPLICAS),
    "ends": Case(PIPELINE, fails=1),
}


def run(data: str, folder: Path, names: Sequence[str]) -> None:
    with entry.errors_in_one_line():
        entry.prepare()
        import torch

        from scripts.parity.runs import record

        rank = int(os.environ["RANK"])
        for name in names:
            case = CASES[name]
            report = folder / name
            flags = [*COMMON, *shlex.split(case.flags), "--data-path", data, "--epp-report-dir", str(report)]
            limits_s: dict[str, float] = {}
            with out_of_memory(case.fails == rank, limits_s):
                record(flags)
            torch.save(limits_s, folder / f"{name}-{rank}.pt")


@contextlib.contextmanager
def out_of_memory(really: bool, limits_s: dict[str, float]) -> Iterator[None]:
    """In the second backward of an iteration: behind its work, so that gradients have been added to by then. Notes the time
    limits of the run's process groups, whether memory runs out or not.
    """
    import torch

    from megatron_epp.mcore.iteration import sliced_run
    from megatron_epp.mcore.model.stage import MegatronStage

    backward = MegatronStage.backward
    count = 0

    def failing(self: MegatronStage, *args: Any) -> None:
        nonlocal count
        backward(self, *args)
        limits_s.update(limits_of(sliced_run.current()))
        if really and sliced_run.current().iteration == FAULT_ITERATION:
            count += 1
            if count == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")

    MegatronStage.backward = failing
    try:
        yield
    finally:
        MegatronStage.backward = backward


def limits_of(run: Any) -> dict[str, float]:
    """In seconds, by the name of each process group of a run."""
    import torch

    from megatron_epp.runtime.links.objects import ObjectGroup

    held = {name: getattr(run.links, name) for name in type(run.links).__slots__} | vars(run)
    levels = {name: value.levels[0] for name, value in held.items() if isinstance(value, ObjectGroup) and value.levels}
    groups = {name: value for name, value in held.items() if isinstance(value, torch.distributed.ProcessGroup)} | levels
    backends = {name: group._get_backend(torch.device("cpu")) for name, group in groups.items()}
    return {name: backend.options._timeout.total_seconds() for name, backend in backends.items()}
