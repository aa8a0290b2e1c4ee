"""Work in a process of its own: results in order, errors come back, and it never outlives what made it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from megatron_epp.plan import InfeasibleError
from megatron_epp.planner.service.worker import Worker, WorkerError
from tests.support.plan.worker_tasks import adder, misbehaving, sleeper


@pytest.fixture(scope="module")
def worker():
    made = Worker(misbehaving)
    yield made
    made.close()


def test_calls_are_answered_in_order_by_one_callable():
    worker = Worker(adder, 100)
    for number in (1, 2, 3):
        worker.send(number)
    assert [worker.receive() for _ in range(3)] == [101, 103, 106]
    assert not worker.is_ready()
    worker.close()


def test_it_imports_no_torch_and_its_output_is_not_an_answer(worker):
    assert "torch" not in worker.call("print")


def test_refusals_come_back_as_they_are(worker):
    with pytest.raises(InfeasibleError, match="needs 12 GB"):
        worker.call("refuse")
    assert "torch" not in worker.call("go on")


def test_other_errors_come_back_by_name(worker):
    with pytest.raises(WorkerError, match="KeyError: 'key'"):
        worker.call("bug")


def test_an_ended_process_is_noticed():
    worker = Worker(misbehaving)
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            worker.call("die")


def test_closing_ends_a_call_in_the_making():
    worker, raised = Worker(sleeper), threading.Event()

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


def test_it_ends_when_the_process_that_made_it_is_killed():
    """In the middle of a call, and with no chance to say goodbye."""
    program = (
        "import os, signal; from tests.support.plan.worker_tasks import sleeper;"
        "from megatron_epp.planner.service.worker import Worker;"
        "worker = Worker(sleeper); worker.send(600); print(worker._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(_python(program).stdout)
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} lives on")


def _python(program: str) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
