"""torchrun, which ends in one line where a process of it does not end well: why, that process has said itself.

`python -m megatron_epp.launch.torchrun` takes what torchrun takes.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run torchrun; exit with code 1 where it raises for a process that failed or for a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(f"megatron-epp: rank {rank} ended first, with exit code {failure.exitcode}: what it said is above")
    except SignalException as error:
        sys.exit(f"megatron-epp: stopped by signal {error.sigval.name}")


if __name__ == "__main__":
    main()
