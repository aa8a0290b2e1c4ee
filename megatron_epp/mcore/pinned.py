"""Training for measurements: `python -m megatron_epp.mcore.pinned FLAGS` trains as `megatron_epp.mcore.pretrain_gpt` does, with
every rank on a core of its own if the machine has no GPU. With `RECORD` set each rank also writes its gradients.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

RECORD = "EPP_RECORD_GRADIENTS"
"""Environment variable: folder to which every rank writes the gradients of the first iteration."""


def pin(rank: int) -> None:
    """Bind this process to one of the cores that it may use, chosen by its rank, with one thread.

    Processes that it forks, such as the planning process, may use all of these cores: cores of waiting ranks are free.
    """
    import torch

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.register_at_fork(after_in_child=partial(os.sched_setaffinity, 0, cores))
    torch.set_num_threads(1)


def main() -> None:
    """Train with the flags of the command line, on the core of this rank."""
    from megatron_epp.launch.machine import count_gpus
    from megatron_epp.mcore import entry, pretrain_gpt

    if not count_gpus():
        pin(int(os.environ["LOCAL_RANK"]))
    if folder := os.environ.get(RECORD):
        with entry.errors_in_one_line():
            entry.prepare()
        from megatron_epp.mcore.training.gradients import record_first

        record_first(Path(folder) / f"gradients-{os.environ['RANK']}.pt")
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
