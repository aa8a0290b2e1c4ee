"""Threads and cores: each thread uses its rank's device or none, works in order, and ends; measured ranks have a core each."""

import ast
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_epp
from megatron_epp.contrib.overlap import turns
from megatron_epp.contrib.overlap.turns import run_together
from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.port.pack_plan import pack
from megatron_epp.runtime.lowered import prepare
from megatron_epp.runtime.side_thread import SideStream, SideThread
from megatron_epp.runtime.watchdog import Watchdog
from tests.pure.test_layers import PURE
from tests.support.calls import run_python
from tests.support.runtime.device_audit import Audit, Event, run, uploader
from tests.support.runtime.runtime_plans import offloading, two_ranks, v_shape_split
from tests.support.runtime.synthetic_sequences import MemoryDataset, plan_of

THREADS = {
    "data/iterator.py ThreadPoolExecutor": "test_a_batch_that_is_prepared_ahead_is_uploaded_to_the_ranks_device",
    "data/iterator.py Thread": "plans, without torch",
    "launch/lifetime.py Thread": "ends the process",
    "runtime/side_thread.py Thread": "test_a_side_thread_uses_the_device_of_the_thread_that_starts_it",
    "contrib/demos/emulate.py ThreadPoolExecutor": "sleeps, on a CPU only",
    "runtime/watchdog.py Thread": "test_the_watchdog_asks_for_progress_on_the_ranks_device",
}
"""Threads that packages outside `PURE` and the command line start, each with the test that runs it or the reason for none."""


@pytest.fixture
def audit():
    turns._second_thread.cache_clear()
    with Audit().installed() as audit:
        yield audit
    turns._second_thread.cache_clear()


def test_the_table_names_every_thread_that_is_started():
    root, found = Path(megatron_epp.__file__).parent, set()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if name.partition("/")[0] in (*PURE, "tools"):
            continue
        calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        called = {getattr(function, "attr", getattr(function, "id", "")) for function in calls}
        found |= {f"{name} {kind}" for kind in called & {"Thread", "ThreadPoolExecutor", "ThreadPool"}}
    assert found == set(THREADS)


def test_the_audit_finds_a_thread_that_has_not_chosen_its_device(audit):
    thread = threading.Thread(target=Event(audit).query, name="stray")
    thread.start()
    thread.join()
    assert audit.faults == [("stray", "query", 0)]


@pytest.mark.parametrize("plan", [lambda: offloading(two_ranks(), 0.5), v_shape_split])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_watchdog_asks_for_progress_on_the_ranks_device(audit, plan, rank):
    watchdog = Watchdog(0.02, lambda message: None)
    run(audit, plan(), rank, watchdog)
    while watchdog._activities:
        watchdog._thread.join(0.01)
    assert "query" in audit.seen["epp-watchdog"]
    assert audit.faults == []


def test_a_side_thread_uses_the_device_of_the_thread_that_starts_it(audit):
    def work():
        stream = torch.cuda.current_stream()
        stream.wait_event(stream.record_event())
        SideStream().start(lambda: audit.touch("work"))()

    SideThread("side").submit(work).result()
    assert run_together(work, work, lambda turns: nullcontext()) == 2
    assert audit.seen["side"] >= {"record_event", "wait_event", "Stream"}
    assert audit.seen["epp-second-action"] >= audit.seen["side"]
    assert audit.faults == []


def test_a_batch_that_is_prepared_ahead_is_uploaded_to_the_ranks_device(audit, monkeypatch):
    upload = uploader(audit, monkeypatch)
    plan = plan_of([5, 4], [[(0, 0, 5)], [(1, 0, 4)]])

    def ready(batch, actions):
        return replace(prepare(plan, 0), upload=upload.begin([torch.zeros(3)]))

    source = PlanSource(lambda batch: (pack(plan, 1.0, (0, 1)),), prepare=ready)
    batches = PlannedBatches(MemoryDataset([5, 4]), [(0, 1)], source)
    program = next(batches).prepared
    batches.close()
    (thread,) = (name for name in audit.seen if name.startswith("epp-prepare"))
    assert "record_event" in audit.seen[thread]
    run(audit, plan, 0, program=program)
    assert audit.faults == []


ENDLESS = """
from time import sleep
from megatron_epp.runtime.side_thread import SideThread
SideThread().start(lambda: sleep(1000))
raise SystemExit(3)
"""


def test_work_runs_in_the_order_in_which_it_was_given():
    thread, ran = SideThread(), []
    waits = [thread.start(lambda number=number: ran.append(number)) for number in range(20)]
    waits[-1]()
    assert ran == list(range(20))


def test_an_error_is_raised_where_the_result_is_waited_for_and_later_work_still_runs():
    thread, ran = SideThread(), []
    failed = thread.start(lambda: int("no number"))
    later = thread.start(lambda: ran.append(1))
    with pytest.raises(ValueError, match="no number"):
        failed()
    later()
    assert ran == [1]


def test_a_process_ends_though_its_work_never_does():
    assert run_python(ENDLESS).returncode == 3


PROGRAM = """
import os
from megatron_epp.mcore.pinned import pin

cores = os.sched_getaffinity(0)
pin(1)
assert os.sched_getaffinity(0) == {sorted(cores)[1 % len(cores)]}
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(os.sched_getaffinity(0) != cores)
"""


def test_a_pinned_rank_has_one_core_and_what_it_forks_has_all():
    done = run_python(PROGRAM)
    assert done.returncode == 0, done.stderr
