"""Workers that are forked from the process that makes them, for short runs: they begin with all that it has imported."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name

from megatron_epp.port.worker import Process, Worker


def fork_workers() -> None:
    """Have `Worker` fork its process, in this process and in processes that it forks, and load the planner now.

    A process that forks must not depend on locks that other threads of its hold: the worker would wait for them forever.
    """
    if Worker.start is forked:
        return
    resolve_name("megatron_epp.planner.service.answers:load_planner")()
    Worker.start = staticmethod(forked)  # type: ignore[method-assign]


def forked(serve: Callable[..., None], *args: object) -> tuple[Process, Connection]:
    """Fork a process that calls a function with the handle of a connection, as `worker.started` starts one."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ours.close()
            os.dup2(2, 1)  # what it prints is no part of the forking process's output
            serve(theirs.fileno(), *args)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    return Forked(pid), ours


class Forked:
    """A forked process, with the methods of `subprocess.Popen` that a worker needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def kill(self) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, the negative number of the signal that ended it. Raises `subprocess.TimeoutExpired`."""
        if not wait([self._ended], timeout):
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def __del__(self) -> None:
        os.close(self._ended)
