"""Runs programs that train in processes forked from one that has imported and prepared Megatron, which takes long.

What a process does when it starts afresh, under torch's launcher, is not tested by these: see `launch.py`.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from launch import ENVIRONMENT, REPOSITORY, TINY, Finished, free_port

RECORDER = Path(__file__).with_name("recorded_training.py")

PATIENCE_S = 30.0
"""For processes that are told to end."""


def launch(num_processes: int, *command: object, env: dict[str, str] | None = None, timeout_s: float = 180) -> Finished:
    """As `launch.launch`: run `command` (script or ``-m module``, then its arguments) as the ranks of a job.

    Raises AssertionError with the output when it takes longer than `timeout_s`; every process it started is gone then.
    """
    parent, lock = _parent()
    with tempfile.TemporaryDirectory() as folder, lock:
        log = Path(folder, "log")
        parent.send((num_processes, [*map(str, command)], env or {}, log, timeout_s))
        code = parent.recv()
        output = log.read_text(errors="replace")
    assert code is not None, f"not finished after {timeout_s} s:\n{output[-5000:]}"
    return Finished(code, output)


def train(folder: Path, num_processes: int, *flags: object, iterations: int, timeout_s: float = 180) -> Finished:
    """Train TINY with `flags` until `iterations`, recorded in `folder`. Raises AssertionError if it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = [*TINY, "--train-iters", iterations, *flags]
    finished = launch(num_processes, RECORDER, *arguments, env={"RECORD_TO": str(folder)}, timeout_s=timeout_s)
    assert finished.returncode == 0, finished.output[-5000:]
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    steps = next(
        {int(i): s for i, s in rank["steps"].items()} for rank in ranks if "loss" in next(iter(rank["steps"].values()))
    )
    return Finished(finished.returncode, finished.output, steps, tuple(rank["weights"] for rank in ranks))


@functools.cache
def _parent() -> tuple[Connection, threading.Lock]:
    """The process that forks the others: one for all tests, started when the first needs it, ended with them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs,)).start()
    theirs.close()
    atexit.register(ours.close)
    return ours, threading.Lock()


def _serve(requests: Connection) -> None:
    os.environ |= ENVIRONMENT  # before torch is imported
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    from parity_worlds import load_megatron

    load_megatron()
    with contextlib.suppress(EOFError):
        while True:
            requests.send(_run(*requests.recv()))


def _run(num_processes: int, command: Sequence[str], env: dict[str, str], log: Path, timeout_s: float) -> int | None:
    """The exit code of the first rank that failed, 0 where none did, None where one took too long."""
    shared = {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_enter, args=(command, env | _texts(shared | {"RANK": rank, "LOCAL_RANK": rank}), log))
        for rank in range(num_processes)
    ]
    for process in processes:
        process.start()
    end_s = time.monotonic() + timeout_s
    try:
        while alive := [process for process in processes if process.is_alive()]:
            if failed := [process.exitcode for process in processes if process.exitcode]:
                return failed[0]
            if time.monotonic() > end_s:
                return None
            wait([process.sentinel for process in alive], timeout=1.0)
        return next((process.exitcode for process in processes if process.exitcode), 0)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            _end(process)


def _texts(values: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _end(process: BaseProcess) -> None:
    """End a process and all that it has started: saving a checkpoint leaves a process behind."""
    process.join(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _enter(command: Sequence[str], env: dict[str, str], log: Path) -> None:
    """Be the program. Its exit code is the process's, its error's traceback goes to the log."""
    os.setpgrp()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ |= env
    run: Callable[..., object] = runpy.run_path
    if command[0] == "-m":
        run, command = functools.partial(runpy.run_module, alter_sys=True), command[1:]
    else:
        sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = [*command]
    run(command[0], run_name="__main__")
