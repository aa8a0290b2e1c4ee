"""Runs programs that train in processes forked from one that has imported and prepared Megatron, which takes long.

What a process does when it starts afresh, under torch's launcher, is not tested by these: see `launch.py`.
"""

import atexit
import functools
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_epp.contrib.demos.forked_ranks import Forks, serve
from megatron_epp.port.worker import started
from megatron_epp.tools.launch import runs
from tests.support.mcore import worker
from tests.support.mcore.figures import FOLDER, recorded
from tests.support.mcore.launch import ENVIRONMENT, TINY, Finished, free_port

SHARED = "EPP_TESTS_SHARED_FORKS"
"""Environment variable that names the socket of the process that all test files share."""
RECORDER = Path(__file__).with_name("recorded_training.py")
CHANGED = RECORDER.with_name("changed_training.py")


def launch(num_processes: int, *command: object, env: dict[str, str] | None = None, timeout_s: float = 180) -> Finished:
    """Run `command` (script or ``-m module``, then its arguments) as the ranks of a job.

    Raises AssertionError with the output when it takes longer than `timeout_s`; every process it started is gone then.
    """
    worker.end()  # its world is a job too
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        meeting = {"MASTER_PORT": str(free_port()), FOLDER: folder}
        code = forks().run(num_processes, [*map(str, command)], meeting | (env or {}), log, timeout_s)
        output, figures = log.read_text(errors="replace"), recorded(Path(folder))
    assert code is not None, f"not finished after {timeout_s} s:\n{output[-5000:]}"
    return Finished(code, output, figures=figures)


def job(processes: int, name: str, /, *, env: dict[str, str] | None = None, timeout_s: float = 180, **given: Any) -> Finished:
    """Run a job (`jobs`), `module` or `module:function`, on fresh ranks, with arguments that JSON can hold, or paths.

    What it returns on a rank, and what it records, are the figures of what finished. The rest is as for `launch`.
    """
    return launch(processes, *command(name, given), env=env, timeout_s=timeout_s)


def command(name: str, given: Mapping[str, object]) -> tuple[str, ...]:
    module, _, function = name.partition(":")
    job = f"tests.support.mcore.jobs.{module}:{function or 'run'}"
    return "-m", worker.MODULE, job, json.dumps(given, default=str)


def succeeded(finished: Finished) -> Finished:
    """Return what has finished. Raises AssertionError with its output if it failed."""
    assert finished.returncode == 0, finished.output[-5000:]
    return finished


def of_ranks(finished: Finished) -> tuple[Any, ...]:
    """Return what the ranks of a job have returned. Raises AssertionError with its output if it failed."""
    return succeeded(finished).figures


def returned(finished: Finished) -> Any:
    """Return what the job's only rank has returned. Raises AssertionError with its output if it failed."""
    (found,) = of_ranks(finished)
    return found


def train(
    folder: Path,
    num_processes: int,
    *flags: object,
    iterations: int,
    timeout_s: float = 180,
    change: str = "",
    tiny: Sequence[str] = TINY,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Train TINY, or others in its place, with `flags` and a change of `changed_training`. Raises AssertionError on failure."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = *((CHANGED, change) if change else (RECORDER,)), *tiny, "--train-iters", iterations, *flags
    env = {"RECORD_TO": str(folder)} | dict(env or {})
    finished = succeeded(launch(num_processes, *command, env=env, timeout_s=timeout_s))
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    steps = next(rank["steps"] for rank in ranks if "loss" in next(iter(rank["steps"].values())))
    steps = {int(iteration): step for iteration, step in steps.items()}
    return Finished(finished.returncode, finished.output, steps, tuple(rank["weights"] for rank in ranks))


def ranks() -> list[psutil.Process]:
    """Return the ranks of the job that runs: processes that lead a group of their own."""
    return [child for child in psutil.Process(forks()._process.pid).children() if os.getpgid(child.pid) == child.pid]


@functools.cache
def forks() -> Forks:
    """Return the process that forks this process's ranks: from the one that all test files share, if there is one."""
    return SharedForks(path) if (path := os.environ.get(SHARED)) else Forks(ENVIRONMENT, (__name__, "preload"))


def fork_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "torchrun", lambda *job: forks().run(*job))


class SharedForks(Forks):
    """A process that forks ranks, itself forked from the one that `share` runs in, which waits at a socket."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(path)
            self._connection = Connection(door.detach())
        self._process = psutil.Process(self._connection.recv())
        atexit.register(self.close)


def start_shared(folder: Path) -> object:
    """Start the process from which those are forked that fork ranks. It ends when what is returned is no longer kept."""
    path = str(folder / "forks")
    # Without TORCH_GLOO_LAZY_INIT, which saves a sixth of a training: ranks may crash where groups are taken down.
    process, connection = started(share, path, options=("-W", "ignore"), environment=ENVIRONMENT)
    connection.recv()
    os.environ[SHARED] = path
    return process, connection


def share(handle: int, path: str) -> None:
    """Import and prepare Megatron, then fork a process that forks ranks for everyone who connects to a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("megatron_epp").setLevel(logging.WARNING)  # it says what is patched
    log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    owner = Connection(handle)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(100)
        owner.send("it may be connected to")
        preload()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # or processes that have ended would stay
        while owner not in wait([door, owner]):
            client = door.accept()[0].detach()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                owner.close()
                door.close()
                connection = Connection(client)
                connection.send(os.getpid())
                serve(os.dup(client), "gc", "collect")
                os._exit(0)
            os.close(client)


def preload() -> None:
    """Prepare Megatron, whose mock data are fewer here: to shuffle ten million samples takes as long as to train on a few.

    Without a GPU its functions are not compiled, which takes every rank ten times as long as its training.
    """
    from megatron_epp.mcore import cpu

    cpu.activate()  # before anything imports Megatron, whose decorators compile
    from megatron_epp.mcore import pinned

    pinned.preload()
    from tests.support.mcore.gloo import share_thread  # which imports torch

    share_thread()
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000
