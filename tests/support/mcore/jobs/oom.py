"""Trains with the named settings of `oom_cases`, in one of which a rank runs out of memory, and writes the time
limits of each run's process groups to a folder.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_epp.mcore import entry
from tests.support.mcore.oom_cases import CASES, COMMON, FAULT_ITERATION


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
