"""Work in a process of its own, started afresh or forked: results in order, errors come back, and it ends with its maker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.planner.service import forks
from megatron_epp.planner.service.worker import Worker, WorkerError
from tests.support.plan.worker_tasks import adder, misbehaving, sleeper

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

Start = Callable[..., Worker]


class Forked(Worker):
    start = staticmethod(forks.forked)  # type: ignore[assignment]


@pytest.fixture(params=[Worker, Forked])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a worker of a task."""
    started: list[Worker] = []

    def of_task(task: Callable[..., Any], *args: Any) -> Worker:
        started.append(request.param(task, *args))
        return started[-1]

    yield of_task
    for worker in started:
        worker.close()


def test_calls_are_answered_in_order_by_one_callable(start: Start):
    worker = start(adder, 100)
    for number in (1, 2, 3):
        worker.send(number)
    assert [worker.receive() for _ in range(3)] == [101, 103, 106]
    assert not worker.is_ready()


def test_its_output_is_no_answer_and_only_a_forked_one_begins_with_what_is_imported(start: Start):
    is_forked = type(worker := start(misbehaving)) is Forked
    assert ("psutil" in worker.call("print")) == is_forked
    assert is_forked or "torch" not in worker.call("go on")


def test_refusals_and_other_errors_come_back_and_it_goes_on(start: Start):
    worker = start(misbehaving)
    with pytest.raises(InfeasibleError, match="needs 12 GB"):
        worker.call("refuse")
    with pytest.raises(WorkerError, match="KeyError: 'key'"):
        worker.call("bug")
    assert "numpy" in worker.call("go on")


def test_an_ended_process_is_noticed(start: Start):
    worker = start(misbehaving)
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            worker.call("die")


def test_closing_ends_a_call_in_the_making(start: Start):
    worker, raised = start(sleeper), threading.Event()

    def wait():
        with pytest.raises(WorkerError):
            worker.call(600)
        raised.set()

    thread = threading.Thread(target=wait)
    thread.start()
    worker.close()
    thread.join(60)
    assert raised.is_set()


def test_an_error_of_a_closed_worker_can_be_collected_as_garbage():
    """Python 3.12 ends with a segmentation fault where it collects a buffer of multiprocessing's in a cycle."""
    program = """
import gc
from tests.support.plan.worker_tasks import adder
from megatron_epp.planner.service.worker import Worker, WorkerError

worker = Worker(adder, 0)
worker.close()
try:
    worker.send(1)
except WorkerError as error:
    error.itself = error
gc.collect()
"""
    assert _python(program).returncode == 0


@pytest.mark.parametrize(
    "before", ["", "forks.fork_workers(); worker.Worker(misbehaving).call('print');"], ids=["afresh", "forked"]
)
def test_it_ends_when_the_process_that_made_it_is_killed_and_keeps_to_standard_error(before: str):
    """In the middle of a call, and with no chance to say goodbye."""
    program = (
        "import os, signal; from tests.support.plan.worker_tasks import misbehaving, sleeper;"
        f"from megatron_epp.planner.service import forks, worker; {before}"
        "one = worker.Worker(sleeper); one.send(600); print(one._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid, end_s = int(_python(program).stdout), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, f"process {pid} lives on"
        time.sleep(0.05)


def _python(program: str) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
