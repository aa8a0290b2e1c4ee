"""Starts the ranks of a gloo job as processes of this machine and runs functions on all of them.

The processes are forked from one that has imported torch and its compiler already, so that starting them takes little.
"""

import multiprocessing
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups

TIMEOUT_S = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "megatron_epp.runtime.executor", "megatron_epp.planner"])


class Ranks:
    """The ranks of one job, waiting for something to run. Use as a context manager.

    Functions must be importable; they are called as ``function(rank, links, *args)``.
    """

    def __init__(self, size, folder):
        pipes = [_context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = _start(size, folder, [(_serve, (theirs,)) for _, theirs in pipes])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pipe in self._pipes:
            pipe.close()
        _end(self._processes)

    def run(self, function, *args):
        """The results, by rank. Raises AssertionError with the traceback of the first rank that failed or hangs."""
        results = self.outcomes(function, *args)
        for rank, result in enumerate(results):
            assert not isinstance(result, str), f"rank {rank}:\n{result}"
        return results

    def outcomes(self, function, *args):
        """Run as `run` does, with the traceback in the place of the result of a rank that failed."""
        for pipe in self._pipes:
            pipe.send((function, args))
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} has not finished {function.__name__} after {TIMEOUT_S} s"
        return [pipe.recv() for pipe in self._pipes]


def ranks_fixture(size):
    """A fixture of the ranks of a job that live as long as a file's tests run."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory):
        with Ranks(size, tmp_path_factory.mktemp("ranks")) as started:
            yield started

    return ranks


@dataclass(frozen=True)
class Ended:
    """End of a rank's process. exit_code: None when it had to be stopped."""

    exit_code: int | None
    stderr: str


def run_until_exit(size, folder, function, *args, wait_for=None):
    """Run ``function(rank, links, *args)`` as each rank's whole program and see how the processes end.

    wait_for: ranks that must end by themselves; the others are stopped after that. Default: all.
    """
    processes = _start(size, folder, [(function, args)] * size)
    waited = range(size) if wait_for is None else wait_for
    for rank in waited:
        processes[rank].join(TIMEOUT_S)
    exit_codes = [process.exitcode for process in processes]
    _end(processes)
    for rank in waited:
        assert exit_codes[rank] is not None, f"rank {rank} hung:\n{_log(folder, rank).read_text()}"
    return [Ended(code, _log(folder, rank).read_text()) for rank, code in enumerate(exit_codes)]


def _start(size, folder, programs):
    Path(folder, "store").unlink(missing_ok=True)
    processes = [
        _context.Process(target=_enter, args=(rank, size, str(folder), *program), daemon=True)
        for rank, program in enumerate(programs)
    ]
    for process in processes:
        process.start()
    return processes


def _end(processes):
    for process in processes:
        process.terminate()
        process.join(TIMEOUT_S)


def _log(folder, rank):
    return Path(folder, f"rank{rank}.stderr")


def _enter(rank, size, folder, function, args):
    os.dup2(os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stderr.fileno())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    function(rank, Links.create(range(size), range(size), Groups(), slots_on_cpu=True), *args)


def _serve(rank, links, pipe):
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            result = function(rank, links, *args)
        except Exception:
            result = traceback.format_exc()
        pipe.send(result)
