"""Short trainings on CPUs whose ranks are forked from one process that has imported Megatron (`mcore.training.forking`)."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path

from megatron_epp.launch.machine import usable_port
from megatron_epp.plan.errors import EppError

_PATIENCE_S = 60.0
"""Time limit for a process to end, which ends its own child processes first."""


class Forks:
    """A process that imports Megatron once and forks the ranks of one job after the other.

    It starts when this object is made, and ends with the process that made it, however that one ends.

    Args:
        environment: variables set in it before it imports anything.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._connection, theirs = Pipe()
        program = f"from megatron_epp.mcore.training.forking import serve; serve({theirs.fileno()})"
        path = os.pathsep.join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, **environment, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what its libraries print is no part of this process's output
        )
        theirs.close()
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
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(usable_port(0))}
        try:
            with self._lock:
                self._connection.send((num_processes, list(command), {**meeting, **environment}, log, limit_s))
                code: int | None = self._connection.recv()
        except (EOFError, OSError):
            raise EppError(f"no ranks: what forks them ended with exit code {self._process.wait()}; see above why") from None
        return code

    def close(self) -> None:
        """End the process and the job that it runs."""
        self._connection.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
