"""torchrun that ends with the reason if one of its processes fails: its refusal, or the file with its output.

Temporary files are in a folder that it removes at its end, and segments of GPU memory expand unless the environment says
otherwise. `python -m megatron_epp.tools.launch.torchrun` takes what torchrun takes. `short_log.LOG_VARIABLE` shortens the log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn

from megatron_epp.launch.lifetime import handed_over, launcher_folder
from megatron_epp.launch.machine import allocator_environment, version_of
from megatron_epp.plan.reading import one_line
from megatron_epp.tools.launch.short_log import LOG_VARIABLE, divided

INTERRUPTED = 130  # exit code of a run that Ctrl-C ended, as shells have it


def main() -> None:
    """Run torchrun; exit with the code of a refusal, 1, or `INTERRUPTED` for SIGINT, also before torchrun listens."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(launcher_folder())
        except OSError as error:
            sys.exit(f"megatron-epp: cannot make a folder for temporary files ({error.strerror}): set TMPDIR to one with space")
        os.environ.update(allocator_environment(os.environ, version_of("torch") or "0.0"))
        try:
            _run(sys.argv[1:])
        except KeyboardInterrupt:
            sys.stderr.write("megatron-epp: stopped by signal SIGINT\n")
            sys.exit(INTERRUPTED)


def _run(arguments: list[str]) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    path = os.environ.pop(LOG_VARIABLE, None)
    log = None
    try:
        with divided(path) as log:
            torchrun(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if (refusal := handed_over(failure.message)) is not None:
            text, exit_code = refusal
            sys.stderr.write(f"{text}\n")
            sys.exit(exit_code)
        if log is not None:
            sys.stderr.write(log.tail())
        sys.exit(f"megatron-epp: rank {rank} failed first, with exit code {failure.exitcode}: its messages are above")
    except SignalException as error:
        _stopped(error.sigval)
    except UnboundLocalError as error:  # torch's `prof`, where the signal comes before its first statement
        if not isinstance(error.__context__, SignalException):
            raise
        _stopped(error.__context__.sigval)
    except RendezvousError as error:
        reason = one_line(error.__cause__ or error) or type(error).__name__
        sys.exit(
            f"megatron-epp: this node cannot reach all others, or has lost them ({reason}): see their logs; check MASTER_ADDR, "
            "MASTER_PORT and NNODES, the same on all nodes, and NODE_RANK, 0 on the node at MASTER_ADDR; launch.wait_seconds "
            "(WAIT_SECONDS) sets how long to wait"
        )
    except OSError as error:
        if path is None or log is not None:
            raise
        sys.exit(f"megatron-epp: {path} cannot be written ({error.strerror}): set launch.folder, or launch.full_log=true")


def _stopped(by: signal.Signals) -> NoReturn:
    if by == signal.SIGINT:
        raise KeyboardInterrupt from None
    sys.exit(f"megatron-epp: stopped by signal {by.name}")


if __name__ == "__main__":
    main()
