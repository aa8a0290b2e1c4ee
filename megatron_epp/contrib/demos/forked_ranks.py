"""Ranks on CPUs that are forked from one process that has imported and prepared Megatron, which takes longer than a short run.

`Forks` is used where jobs come from, which needs neither torch nor Megatron; other functions run in the process that forks, and
in the ranks. They are not equivalent to processes that torch's launcher starts: CUDA, above all, does not survive a fork.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatron_epp.launch import lifetime
from megatron_epp.launch.machine import free_port
from megatron_epp.plan.errors import EppError
from megatron_epp.port.worker import started

_PATIENCE_S = 30.0
"""Time limit in seconds for processes that are told to end."""


class Forks:
    """A process that imports Megatron once and forks the ranks of one job after the other.

    It starts when this object is made, and ends with the process that made it, however that one ends.

    Args:
        preload: module and name of the function that it calls first; all that this leaves is in the ranks, too.
    """

    def __init__(self, environment: Mapping[str, str], preload: tuple[str, str]) -> None:
        self._lock = threading.Lock()
        self._process, self._connection = started(serve, *preload, options=("-W", "ignore"), environment=environment)
        atexit.register(self.close)

    def run(
        self, num_processes: int, command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float
    ) -> int | None:
        """Run a script, or a module after ``-m``, as the ranks of a job; their output is appended to a log.

        Their rendezvous is on a free local port, or at the address that `environment` sets.

        Returns:
            The exit code of the first rank that failed, 0 if none did, None if one took longer than `limit_s`. Every process of
            the job has ended then.

        Raises:
            EppError: the process that forks has ended.
        """
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        try:
            with self._lock:
                self._connection.send((num_processes, list(command), {**rendezvous, **environment}, log, limit_s))
                code: int | None = self._connection.recv()
        except (EOFError, OSError):
            raise EppError(f"no ranks: what forks them ended with exit code {self._process.wait()}; see above why") from None
        return code

    def close(self) -> None:
        """End the process and the job that it runs."""
        self._connection.close()
        try:
            self._process.wait(2 * _PATIENCE_S)  # it ends its own processes first
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(handle: int, module: str, name: str) -> None:
    """Call a function of a module, then run jobs that `Forks` sends over a connection, one after the other, until the process
    that sends them has ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a keyboard, meant for the sender of jobs; this process ends with it
    jobs = Connection(handle)
    package_logger = logging.getLogger("megatron_epp")
    package_logger.setLevel(logging.WARNING)  # logs of jobs say what is patched; this process has none
    with lifetime.launcher_folder():
        getattr(importlib.import_module(module), name)()
        package_logger.setLevel(logging.NOTSET)
        with contextlib.suppress(EOFError, OSError):
            while True:
                jobs.send(_run(jobs, *jobs.recv()))


def _run(
    jobs: Connection, num_processes: int, command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float
) -> int | None:
    """Run a job. Returns the exit code of the first rank that failed, 0 if none did, None if one exceeded the time limit."""
    context = multiprocessing.get_context("fork")
    sizes = {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    processes = [context.Process(target=_be_rank, args=(jobs, command, {**env, **sizes, **rank}, log)) for rank in ranks]
    for process in processes:
        process.start()
    end_s = time.monotonic() + limit_s
    try:
        while alive := [process for process in processes if process.is_alive()]:
            if failed := [process.exitcode for process in processes if process.exitcode]:
                return failed[0]
            if time.monotonic() > end_s:
                return None
            if jobs in wait([jobs, *(process.sentinel for process in alive)], timeout=1.0):
                raise EOFError  # the sender has ended: it sends nothing before it has its answer
        return next((process.exitcode for process in processes if process.exitcode), 0)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            _end(process)


def _end(process: BaseProcess) -> None:
    """End a process and all processes that it has started, such as the one that remains after saving a checkpoint."""
    assert process.pid is not None
    process.join(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _be_rank(jobs: Connection, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
    """Run a job's command as one rank, in this process. The exit code is the command's; a traceback goes to the log."""
    lifetime.end_with_parent()
    jobs.close()
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        # One write per line, at once: ranks that share the log do not cut each other's lines, PYTHONUNBUFFERED or not.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    os.environ |= env
    run: Callable[..., object] = runpy.run_path
    if command[0] == "-m":
        run, command = functools.partial(runpy.run_module, alter_sys=True), command[1:]
    else:
        sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = [*command]
    run(command[0], run_name="__main__")
