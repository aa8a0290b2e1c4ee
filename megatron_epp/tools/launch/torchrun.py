"""torchrun that ends with the reason if one of its processes fails: its refusal, or the file with its output.

Temporary files are in a folder that it removes at its end, and segments of GPU memory expand unless the environment says
otherwise. With `LOG_VARIABLE` all output goes to a file, and of Megatron's thousand lines before the first iteration only this
package's, warnings and errors to the terminal, with iterations and checkpoints; on a failure the end of the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from megatron_epp.launch.lifetime import handed_over, launcher_folder
from megatron_epp.launch.machine import allocator_environment, version_of
from megatron_epp.plan.reading import one_line

LOG_VARIABLE = "EPP_LOG_FILE"  # environment variable with the path of the file; without it everything is printed as it comes
_TAIL_LINES = 40
_WAIT_S = 5.0  # seconds to wait for the last lines at the end, which a process that outlives the run may hold back
_SHOWN = re.compile(
    rb"megatron[-_]epp|\bepp (iteration|memory|hint|run)\b|(?<!consumed )\biteration +\d+ */ *\d+|validation loss"
    rb"|exiting program|no GPU found"
    rb"|^(\[rank\d+\]:? ?)?(WARNING|ERROR|CRITICAL|Error|FATAL)\b"
    rb"|\b(saving|saved|loading|loaded) (a )?checkpoint|could not find the metadata file"
)
"""Pattern of the lines that are shown."""
_HIDDEN = re.compile(
    rb"\.py:\d+: \w*Warning: |one_logger package is required|Result validation enabled|RerunStateMachine initialized"
    rb"|GPTModel IS DEPRECATED|^INFO:megatron\.|patched megatron|  File \""
)
"""Pattern of lines among these that say nothing to a user: warnings of imports, and what Megatron tells its developers."""
INTERRUPTED = 130  # exit code of a run that Ctrl-C ended, as shells have it


def is_shown(line: bytes) -> bool:
    return _SHOWN.search(line) is not None and _HIDDEN.search(line) is None


class ShortLog:
    def __init__(self, path: Path, terminal: int) -> None:
        self.path = path
        self._terminal = terminal
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def read(self, source: int) -> None:
        """Read output until all its writers have ended: all of it goes to the file, the short form to the terminal."""
        unended_line = b""
        with open(self.path, "ab", buffering=0) as file, open(source, "rb", buffering=0) as output:
            while chunk := output.read(1 << 16):
                file.write(chunk)
                *lines, unended_line = (unended_line + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
        if unended_line:
            self._take(unended_line)

    def _take(self, line: bytes) -> None:
        self._tail.append(line)
        if is_shown(line):
            with contextlib.suppress(OSError):  # a terminal that is closed ends no training
                os.write(self._terminal, line + b"\n")

    def tail(self) -> str:
        text = b"\n".join(self._tail).decode("utf-8", errors="replace")
        return f"--- the last lines of {self.path} ---\n{text}\n--- all of it is in {self.path} ---\n"


@contextlib.contextmanager
def divided(path: str | None) -> Iterator[ShortLog | None]:
    """Send what this process and its children print in the body to a file, if any, and the short form to the terminal."""
    if path is None:
        yield None
        return
    open(path, "ab").close()
    os.environ["PYTHONUNBUFFERED"] = "1"  # in a pipe, lines of the ranks would wait for a full buffer
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    source, sink = os.pipe()
    log = ShortLog(Path(path), saved[0])
    reader = threading.Thread(target=log.read, args=(source,), name="short log", daemon=True)
    reader.start()
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    try:
        yield log
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        reader.join(_WAIT_S)


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

    path, log = os.environ.pop(LOG_VARIABLE, None), None
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
