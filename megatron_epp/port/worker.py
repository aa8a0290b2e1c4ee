"""Worker process that calls one function with the arguments sent to it, one call at a time."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any, Protocol

from megatron_epp.plan import EppError

EXIT_WAIT_S = 5.0
"""Seconds to wait for the exit of an ended process. Not measured: one that is killed is gone in far less."""


class WorkerError(EppError):
    """The process ended, or what it ran raised something else than an `EppError`."""


class EndedError(WorkerError):
    """The process ended."""


class Process(Protocol):
    """The methods of `subprocess.Popen` that a worker needs."""

    pid: int
    returncode: int | None

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Worker:
    """A process that calls functions by their names. Answers come in the order of the calls.

    It starts a fresh interpreter that imports nothing but what it is asked for: multiprocessing would import the training
    script again, and with it torch. It ends with the process that made it, however that ends. `forked.fork_workers` changes how
    it starts. `niceness` is added to the process's own, so that it takes only time that others leave.
    """

    def __init__(self, niceness: int = 0) -> None:
        self._process, self._connection = self.start(serve, niceness)
        self._num_sent = 0  # calls whose answers are not read yet

    @staticmethod
    def start(serve: Callable[..., None], *args: object) -> tuple[Process, Connection]:
        """Start the process, which calls a function with the handle of a connection and `args`."""
        return started(serve, *args)

    def call(self, name: str, *args: Any) -> Any:
        """Return or raise what ``module:function`` does; answers to `send` are dropped. Raises `EndedError`."""
        self.send(name, *args)
        outcome = None
        while self._num_sent:
            try:
                outcome = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise self._ended() from None
            self._num_sent -= 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def send(self, name: str, *args: Any) -> None:
        """Have a function called, without waiting for it. Raises `EndedError` when the process has ended."""
        try:
            _send(self._connection, (name, *args))
        except OSError:
            raise self._ended() from None
        self._num_sent += 1

    def close(self) -> None:
        """End the process, whatever it is doing. A thread that waits in `call` gets an `EndedError`."""
        self._process.kill()
        self._process.wait()

    def _ended(self) -> EndedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_WAIT_S)
        return EndedError(f"the planning process has ended with exit code {self._process.returncode}; see its output above")


def started(
    serve: Callable[..., None], *args: object, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start an interpreter that calls a module's function with a connection's handle; return the process and our end.

    `environment` is set before anything is imported, in addition to this process's variables.
    """
    ours, theirs = Pipe()
    values = ", ".join(map(repr, (theirs.fileno(), *args)))
    program = f"from {serve.__module__} import {serve.__name__}; {serve.__name__}({values})"
    path = os.pathsep.join(part for part in sys.path if part)
    process = subprocess.Popen(
        [sys.executable, *options, "-c", program],
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what its libraries print is no part of this process's output
    )
    theirs.close()
    return process, ours


def _send(connection: Connection, item: Any) -> None:
    """Send an item like `Connection.send`, but pickle it first.

    `Connection.send` pickles into a buffer that the error of a failed send would hold on to: Python 3.12 crashes where it
    collects such a buffer with the cycle that an error is often in.
    """
    connection.send_bytes(pickle.dumps(item))


def serve(handle: int, niceness: int) -> None:
    """The process's program: answer calls until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a keyboard, meant for training; this process ends with it
    os.nice(niceness)
    connection = Connection(handle)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    while True:
        _send(connection, _outcome(calls.get()))


def _listen(connection: Connection, calls: queue.SimpleQueue[bytes]) -> None:
    while True:
        try:
            calls.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _outcome(message: bytes) -> Any:
    """Make a call. Its arguments are read here, not where it is received: two threads that import may see half a module."""
    try:
        name, *args = pickle.loads(message)
        return resolve_name(name)(*args)
    except EppError as error:
        return error
    except Exception as error:  # whatever it is, the caller must hear of it; where it came from is in this process's output
        traceback.print_exc()
        return WorkerError(f"planning failed with {type(error).__name__}: {error}")
