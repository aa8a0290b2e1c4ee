"""Work in a process of its own: results in order, errors come back, and the planner of a training run outlives its process."""

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import psutil
import pytest
from hypothesis import given

from megatron_epp.plan import InfeasibleError, Op, Plan, PlanError
from megatron_epp.plan.document import digest
from megatron_epp.plan.lowering import lower
from megatron_epp.planner import Options
from megatron_epp.planner.service import answers
from megatron_epp.port import forked
from megatron_epp.port.pack_plan import pack
from megatron_epp.port.planning import PROCESS_RESTARTS, BackgroundPlanner, PlanningProcess
from megatron_epp.port.worker import Worker, WorkerError
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import hybrid

ASKED = problem((900, 300, 44, 512), 2)
TASKS = "tests.support.plan.worker_tasks"


@contextmanager
def background(options: Options = Options(), **named: Any) -> Iterator[BackgroundPlanner]:  # noqa: B008 - frozen
    planner = BackgroundPlanner(pipeline(2), options, **named)
    with closing(planner.process):
        yield planner


@pytest.fixture(scope="module")
def planner() -> Iterator[BackgroundPlanner]:
    with background() as planner:
        yield planner


@pytest.fixture(scope="module")
def made(planner: BackgroundPlanner) -> list[Plan]:
    return plans(planner)


def plans(planner: BackgroundPlanner) -> list[Plan]:
    return [packed.plan() for packed in planner.plan(ASKED)]


def test_a_process_that_has_ended_is_started_again_and_makes_the_same_plans(
    planner: BackgroundPlanner, made: list[Plan], caplog: pytest.LogCaptureFixture
):
    for _ in range(2):
        planner.process._worker._process.kill()
        with caplog.at_level(logging.WARNING):
            assert plans(planner) == made
    assert caplog.text.count("has ended with exit code -9; see its output above; it is started again") == 2


@pytest.mark.parametrize(
    ("options", "ended"),
    [(Options(), False), (Options(recompute=0), False), (Options(planner=f"{TASKS}:ending"), False), (Options(), True)],
    ids=("default", "nothing fits in loading", "a planner of the user's", "a process that has ended is started again"),
)
def test_a_process_that_is_started_early_makes_the_plans_of_one_that_knows_its_costs(
    options: Options, ended: bool, made: list[Plan], caplog: pytest.LogCaptureFixture
):
    process = PlanningProcess()
    process.prepare(options)
    if ended:
        process._worker.close()
    with background(process=process) as early:
        assert plans(early) == made
    assert ("it is started again" in caplog.text) == ended


@pytest.mark.parametrize(("lengths", "least"), [((90_000, 3_000), 1.8), (tuple(range(200, 400, 5)), 1.2)])
def test_a_batch_is_cut_coarser_or_finer_than_is_fastest(planner: BackgroundPlanner, lengths: tuple[int, ...], least: float):
    """Slices of a long sequence, and chunks of several short ones, of which small ones at the ends of a table can be few."""

    def largest_us(plan: Plan) -> float:
        return max(step.time_us for row in plan.ranks for step in row if step.action.op is Op.F)

    coarse, fastest, fine = (largest_us(planner.plan(problem(lengths, 2), grain)[0].plan()) for grain in (0.5, 1.0, 2.0))
    assert least * fastest < coarse < 2.2 * fastest
    assert 1.6 * fine < fastest < 2.2 * fine


def test_planners_that_know_slices_alone_get_more_or_fewer_of_them():
    long = problem((90_000, 3_000), 2)

    def slices(plan: Plan) -> int:
        return sum(any(segment.sequence == 0 for segment in chunk.segments) for chunk in plan.chunks)

    with background(Options(planner="terapipe")) as planner:
        coarse, fastest, fine = (slices(planner.plan(long, grain)[0].plan()) for grain in (0.5, 1.0, 2.0))
    assert 1 < coarse == round(fastest / 2)
    assert fine == 2 * fastest


def test_the_peak_is_told_of_the_first_plan_that_a_training_runs():
    with background() as planner:
        planner.plan(ASKED, is_run=False)
        planner.plan(replace(ASKED, forward_only=True))
        told_of, *others = (planner.plan(ASKED)[0] for _ in range(3))
    assert told_of.peak_items is not None
    assert sum(told_of.peak_items.values()) == max(told_of.plan().predicted.peak_bytes)
    assert [packed.peak_items for packed in others] == [None, None]


def test_slices_that_the_user_chose_stay():
    with background(Options(slices=3)) as planner:
        assert planner.plan(ASKED, 2.0)[0].plan() == plans(planner)[0]


def test_a_process_that_ends_again_and_again_is_an_error_and_a_closed_planner_starts_none(caplog: pytest.LogCaptureFixture):
    with background(Options(planner=f"{TASKS}:ending")) as planner:
        with pytest.raises(WorkerError, match="has ended with exit code 9"):
            planner.plan(ASKED)
        assert caplog.text.count("it is started again") == PROCESS_RESTARTS
        planner.process.close()
        caplog.clear()
        with pytest.raises(WorkerError, match="has ended"):
            planner.plan(ASKED)
    assert not caplog.text


def test_a_process_keeps_nothing_of_batches_that_it_planned_long_ago(monkeypatch: pytest.MonkeyPatch):
    for name in ("_plans", "_division"):
        known = getattr(answers, name)
        assert known.cache_info().maxsize == answers.CACHED_PLANS
        monkeypatch.setattr(answers, name, lru_cache(2)(known.__wrapped__))
    costs = pipeline(2)
    batches, counts = [problem((300 + 7 * i, 44), 2) for i in range(3)], []
    gc.freeze()  # what other tests hold is neither searched nor counted
    for _ in range(5):
        for batch in batches:
            answers.plans_of_batch(batch, costs, Options(), 0, ((0,), (1,)), 1.0)
        gc.collect()
        counts.append(len(gc.get_objects()))
    gc.unfreeze()
    planned_since = len(batches) * len(counts[3:])
    assert counts[-1] - counts[2] < planned_since / 2, counts


@given(sound_plans())
def test_a_packed_plan_is_the_plan_and_the_actions_of_every_rank(plan: Plan):
    packed = pack(plan, 1.5, tuple(range(len(plan.lengths))), 7)
    assert packed.plan() == plan
    assert tuple(packed.actions(rank) for rank in range(plan.num_ranks)) == lower(plan)
    assert packed.plan_digest == digest(plan)
    assert packed[3:] == (1.5, tuple(range(len(plan.lengths))), 7, None)


@pytest.mark.parametrize("damage", [lambda m: b"", lambda m: b"no plan", lambda m: m[:-9], lambda m: m[:20] + m[21:]])
def test_a_damaged_message_is_refused(damage: Callable[[bytes], bytes]):
    packed = pack(hybrid(), 0.0, ())
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(message=damage(packed.message)).plan()
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(rows=tuple(map(damage, packed.rows))).actions(0)


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Forked(Worker):
    start = staticmethod(forked.forked)  # type: ignore[assignment]


@pytest.fixture(params=[Worker, Forked])
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    worker = request.param()
    yield worker
    worker.close()


def test_calls_are_answered_in_order_and_answers_to_what_was_only_sent_are_dropped(worker: Worker):
    worker.send(f"{TASKS}:add", 100)
    assert [worker.call(f"{TASKS}:add", number) for number in (1, 2)] == [101, 103]
    worker.send(f"{TASKS}:misbehave", "bug")
    assert worker.call(f"{TASKS}:add", 3) == 106


def test_its_output_is_no_answer_and_only_a_forked_one_begins_with_what_is_imported(worker: Worker):
    is_forked = type(worker) is Forked
    assert ("psutil" in worker.call(f"{TASKS}:misbehave", "print")) == is_forked
    assert is_forked or "torch" not in worker.call(f"{TASKS}:misbehave", "go on")


def test_refusals_and_other_errors_come_back_and_it_goes_on(worker: Worker):
    with pytest.raises(InfeasibleError, match="needs 12 GB"):
        worker.call(f"{TASKS}:misbehave", "refuse")
    with pytest.raises(WorkerError, match="KeyError: 'key'"):
        worker.call(f"{TASKS}:misbehave", "bug")
    assert "numpy" in worker.call(f"{TASKS}:misbehave", "go on")


def test_an_ended_process_is_noticed(worker: Worker):
    for _ in range(2):
        with pytest.raises(WorkerError, match="ended with exit code 3"):
            worker.call(f"{TASKS}:misbehave", "die")


def test_closing_ends_a_call_in_the_making(worker: Worker):
    raised = threading.Event()

    def wait():
        with pytest.raises(WorkerError):
            worker.call(f"{TASKS}:sleep", 600)
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
from megatron_epp.port.worker import Worker, WorkerError

worker = Worker()
worker.close()
try:
    worker.send('time:sleep', 1)
except WorkerError as error:
    error.itself = error
gc.collect()
"""
    assert _python(program).returncode == 0


@pytest.mark.parametrize(
    "before", ["", "forked.fork_workers(); worker.Worker().call('builtins:print', 'noise');"], ids=["afresh", "forked"]
)
def test_it_ends_when_the_process_that_made_it_is_killed_and_keeps_to_standard_error(before: str):
    """In the middle of a call, and with no chance to say goodbye."""
    program = (
        "import os, signal;"
        f"from megatron_epp.port import forked, worker; {before}"
        "one = worker.Worker(); one.send('time:sleep', 600); print(one._process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    pid, end_s = int(_python(program).stdout), time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s, f"process {pid} lives on"
        time.sleep(0.05)


def _python(program: str) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE)
