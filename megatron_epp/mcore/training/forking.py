"""Training processes forked from one that has imported and prepared Megatron, which on a CPU takes longer than a short run.

They are not equivalent to processes that torch's launcher starts: CUDA, above all, does not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_epp.launch import lifetime
from megatron_epp.mcore import entry

_LATE = (  # what training imports when it is under way
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron_epp.mcore.training.elastic",
    "megatron_epp.mcore.model.gpt",
    "torch._dynamo",
)
_PATIENCE_S = 30.0
"""Time limit in seconds for processes that are told to end."""


def preload() -> None:
    """Import and patch everything that a training needs, so that processes forked later inherit it."""
    entry.prepare()
    for module in _LATE:
        importlib.import_module(module)
    _read_settings_once()
    gc.freeze()  # what is there now stays, and need not be looked through after every training


def _read_settings_once() -> None:
    """Cache the flag descriptions that Megatron parses from its settings' sources for each of a training's two parsers."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megatron_epp.mcore.arguments.flags import megatron_parser

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def read_once(self: Any, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = read(self, settings)
        return known[settings]

    ArgumentGroupFactory._get_field_docstrings = read_once
    megatron_parser()


def serve(handle: int) -> None:
    """Run jobs one after the other, as the main function of the forking process, until the process that sends them has ended.

    Args:
        handle: handle of the connection over which `launch.forked.Forks` sends jobs.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a keyboard, meant for the sender of jobs; this process ends with it
    jobs = Connection(handle)
    ours = logging.getLogger("megatron_epp")
    ours.setLevel(logging.WARNING)  # logs of jobs say what is patched; this process has none
    with lifetime.launcher_folder():
        with entry.errors_in_one_line():
            preload()
        ours.setLevel(logging.NOTSET)
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
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # for those who follow the log
    os.environ |= env
    run: Callable[..., object] = runpy.run_path
    if command[0] == "-m":
        run, command = functools.partial(runpy.run_module, alter_sys=True), command[1:]
    else:
        sys.path.insert(0, str(Path(command[0]).parent))
    sys.argv = [*command]
    run(command[0], run_name="__main__")
