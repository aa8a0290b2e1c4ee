"""Ranks on cores of their own: `python -m scripts.bench.pinned FLAGS` trains as `megatron_epp.mcore.pretrain_gpt` does."""

from __future__ import annotations

import os


def pin(rank: int) -> None:
    """Bind this process to the machine's core of a rank's number, with one thread."""
    import torch

    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    torch.set_num_threads(1)


def main() -> None:
    """Train with the flags of the command line, on the core of this rank."""
    from megatron_epp.mcore import pretrain_gpt

    pin(int(os.environ["LOCAL_RANK"]))
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
