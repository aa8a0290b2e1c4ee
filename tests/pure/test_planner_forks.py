"""Workers that are forked: the same answers and ends as of those that start afresh, with all that was imported before."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.planner.service import forks
from megatron_epp.planner.service.worker import Worker, WorkerError
from tests.support.plan.worker_tasks import adder, misbehaving, sleeper

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Forked(Worker):
    start = staticmethod(forks.forked)  # type: ignore[assignment]


@pytest.fixture
def worker():
    made: list[Worker] = []

    def make(task: Callable[..., Any], *args: Any) -> Worker:
        made.append(Forked(task, *args))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_calls_are_answered_in_order_by_one_callable(worker):
    adding = worker(adder, 100)
    for number in (1, 2, 3):
        adding.send(number)
    assert [adding.receive() for _ in range(3)] == [101, 103, 106]
    assert not adding.is_ready()


def test_refusals_and_other_errors_come_back(worker):
    one = worker(misbehaving)
    with pytest.raises(InfeasibleError, match="needs 12 GB"):
        one.call("refuse")
    with pytest.raises(WorkerError, match="KeyError: 'key'"):
        one.call("bug")


def test_an_ended_process_is_noticed(worker):
    one = worker(misbehaving)
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            one.call("die")


def test_closing_ends_a_call_in_the_making(worker):
    one, raised = worker(sleeper), threading.Event()

    def wait():
        with pytest.raises(WorkerError):
            one.call(600)
        raised.set()

    thread = threading.Thread(target=wait)
    thread.start()
    one.close()
    thread.join(60)
    assert raised.is_set()


def test_it_ends_when_the_process_that_made_it_is_killed_and_keeps_to_standard_error():
    program = (
        "import os, signal, wave; from tests.support.plan.worker_tasks import misbehaving, sleeper;"
        "from megatron_epp.planner.service import forks, worker;"
        "forks.fork_workers(); one = worker.Worker(misbehaving); one.call('print');"
        "another = worker.Worker(sleeper); another.send(600); print(another._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False).stdout)
    end_s = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, f"process {pid} lives on"
        time.sleep(0.05)


def test_it_begins_with_what_is_imported(worker):
    assert "numpy" in sys.modules
    assert "numpy" in worker(misbehaving).call("look")
