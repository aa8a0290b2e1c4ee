"""The ranks in which tests run functions: they keep their interpreter, and change their process groups between two calls.

`call` names a function and its arguments; a world of as many ranks as are asked for runs it in groups of its own and takes all
that is global of Megatron down behind it. The world stays for the next call; one of another size, or another job that is forked
(`forked.launch`), ends it, and so does a call that fails.

    python -m tests.support.mcore.worker MODULE:FUNCTION JSON      one call, as a job of `forked.launch` or of torch's launcher
    python -m tests.support.mcore.worker --serve SOCKET            a rank of a world
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MODULE = "tests.support.mcore.worker"
_START_S = 600.0
"""Longest time until all ranks are there; they are forked from a process that may first have to import Megatron."""
_MOST_CALLS = 24
"""Calls after which a world is replaced: what process groups leave behind adds up."""
_world: "_World | None" = None


def call(num_processes: int, function: str, *, limit_s: float = 300, fresh: bool = False, **arguments: Any) -> list[Any]:
    """Call a function ``module:function`` on every rank of a world, with process groups of its own; return what it did, by
    rank.

    Args:
        fresh: in a world that has called nothing before.

    Raises AssertionError with the end of the ranks' output where it fails or takes longer than the limit.
    """
    global _world
    if _world is not None and (fresh or _world.num_processes != num_processes or _world.num_calls == _MOST_CALLS):
        end()
    if _world is None:
        _world = _World(num_processes)
        atexit.unregister(end)
        atexit.register(end)  # ahead of what ends the process that forks
    try:
        return _world.call(function, arguments, limit_s)
    except BaseException:
        end()
        raise


def end() -> None:
    global _world
    world, _world = _world, None
    if world is not None:
        world.close()


class _World:
    """Ranks that wait for calls: a job of the process that forks them, which runs no other meanwhile."""

    def __init__(self, num_processes: int) -> None:
        from tests.support.mcore.forked import forks  # which ends the world before it forks another job

        self.num_processes, self.num_calls = num_processes, 0
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        self._log.touch()
        with socket.socket(socket.AF_UNIX) as door:
            path = str(Path(self._folder.name, "door"))
            door.bind(path)
            door.listen(num_processes)
            door.settimeout(1.0)
            self._end_s = time.monotonic() + _START_S
            job = num_processes, ["-m", MODULE, "--serve", path], {}, self._log, float("inf")
            self._job = threading.Thread(target=forks().run, args=job, daemon=True)
            self._job.start()
            met = [Connection(self._next(door).detach()) for _ in range(num_processes)]
        self._ranks = [rank for _, rank in sorted(((rank.recv(), rank) for rank in met), key=lambda pair: pair[0])]

    def _next(self, door: socket.socket) -> socket.socket:
        """Return a rank's end of a connection. Raises AssertionError if the ranks have ended, or take too long to come."""
        while True:
            with contextlib.suppress(TimeoutError):
                return door.accept()[0]
            assert self._job.is_alive(), f"the ranks have ended:\n{self._said(0)}"
            assert time.monotonic() < self._end_s, f"the ranks are not there after {_START_S:g} s:\n{self._said(0)}"

    def call(self, function: str, arguments: Mapping[str, Any], limit_s: float) -> list[Any]:
        """Call a function on every rank. Raises AssertionError where it fails or takes longer than the limit."""
        start = self._log.stat().st_size
        store = str(Path(self._folder.name, f"store{self.num_calls}"))
        self.num_calls += 1
        asked = json.dumps({"function": function, "arguments": arguments, "store": store}).encode()
        for rank in self._ranks:
            rank.send_bytes(asked)
        answers: dict[Connection, Any] = {}
        end_s = time.monotonic() + limit_s
        while waiting := [rank for rank in self._ranks if rank not in answers]:
            ready = wait(waiting, timeout=max(0.0, end_s - time.monotonic()))
            assert ready, f"{function} has not finished after {limit_s:g} s:\n{self._said(start)}"
            for rank in ready:
                assert isinstance(rank, Connection)
                try:
                    answers[rank] = pickle.loads(rank.recv_bytes())
                except (EOFError, OSError):
                    raise AssertionError(f"{function} failed:\n{self._said(start)}") from None
        return [answers[rank] for rank in self._ranks]

    def _said(self, start: int) -> str:
        time.sleep(0.5)  # other ranks may have the reason
        return self._log.read_bytes()[start:].decode(errors="replace")[-5000:]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        self._job.join()
        self._folder.cleanup()


def main(argv: Sequence[str]) -> None:
    if argv[0] == "--serve":
        serve(argv[1])
        return
    from tests.support.mcore.figures import record_figures

    if (found := run(argv[0], json.loads(argv[1]))) is not None:
        record_figures(found)


def run(function: str, arguments: Mapping[str, Any]) -> Any:
    """Call a function ``module:function`` and return what it does. The argument `folder`, if it has one, is a path."""
    module, name = function.split(":")
    paths = {key: Path(value) for key, value in arguments.items() if key == "folder"}
    return getattr(importlib.import_module(module), name)(**arguments | paths)


def serve(path: str) -> None:
    """Be a rank of a world: make the calls that come over a connection, until it ends."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        calls = Connection(door.detach())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    calls.send(rank)
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                asked = json.loads(calls.recv_bytes())
                dist.init_process_group("gloo", init_method=f"file://{asked['store']}", rank=rank, world_size=size)
                dist.barrier()  # or a rank that exchanges nothing may take the group down while another one still connects
                answer = pickle.dumps(run(asked["function"], asked["arguments"]))
                forget_training()
                calls.send_bytes(answer)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at once, for others wait for this rank
    os._exit(0)


def forget_training() -> None:
    """Take down what is global of a training: Megatron's settings, calculators, losses, groups, our run, torch's groups."""
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import global_vars

    from megatron_epp.mcore.iteration import sliced_run

    sliced_run.end()
    global_vars.destroy_global_vars()
    destroy_num_microbatches_calculator()
    destroy_rerun_state_machine()
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    mpu.destroy_model_parallel()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
