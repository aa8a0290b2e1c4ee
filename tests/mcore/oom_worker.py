"""Trains with the settings of `oom_cases` that OOM_CASES names, in one of which a rank runs out of memory once, and keeps what
each run did in OOM_FOLDER.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oom_cases import CASES, COMMON, FAULT_ITERATION

from megatron_epp.mcore import entry

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


def main() -> None:
    with entry.errors_in_one_line():
        entry.prepare()
        import torch
        from parity_runs import record

        folder, rank = Path(os.environ["OOM_FOLDER"]), int(os.environ["RANK"])
        for name in os.environ["OOM_CASES"].split("; "):
            case = CASES[name]
            report = folder / name
            flags = [*COMMON, *shlex.split(case.flags), "--data-path", os.environ["OOM_DATA"], "--epp-report-dir", str(report)]
            with out_of_memory(case.fails == rank):
                run = record(flags)
            plans = [(plan.cap_bytes, plan.predicted.peak_bytes) for plan in run.plans]
            kept = {"losses": run.losses, "validation": run.validation, "final": run.final, "plans": plans}
            torch.save(kept, folder / f"{name}-{rank}.pt")


@contextlib.contextmanager
def out_of_memory(really: bool) -> Iterator[None]:
    """In the second backward of an iteration: behind its work, so that gradients have been added to by then."""
    import torch

    from megatron_epp.mcore import session
    from megatron_epp.mcore.stage import MegatronStage

    backward = MegatronStage.backward
    count = 0

    def failing(self: MegatronStage, *args: Any) -> None:
        nonlocal count
        backward(self, *args)
        if session.current().iteration == FAULT_ITERATION:
            count += 1
            if count == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")

    MegatronStage.backward = failing if really else backward
    try:
        yield
    finally:
        MegatronStage.backward = backward


if __name__ == "__main__":
    main()
