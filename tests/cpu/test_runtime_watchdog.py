"""The watchdog, with a clock that the test turns."""

import threading
import time
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megatron_epp.runtime import watchdog as watchdog_module
from megatron_epp.runtime.watchdog import Progress, ProgressPoint, Watchdog, device_mark
from tests.support.calls import run_python


class Watched:
    """A watchdog with a limit of 10 seconds, which looks where time passes in the test, and what it reports."""

    def __init__(self):
        self.now_s, self.reports = 0.0, []
        self.watchdog = Watchdog(10, self.reports.append)
        self.watch = self.watchdog.watch

    def monotonic(self):
        """Watchdogs that earlier tests left running keep the real time."""
        return self.now_s if threading.current_thread() is threading.main_thread() else time.monotonic()

    def advance(self, seconds):
        self.now_s += seconds
        self.watchdog.look()


@pytest.fixture
def watched(monkeypatch):
    watched = Watched()
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=watched.monotonic, sleep=time.sleep))
    monkeypatch.setattr(watchdog_module, "_look_often", lambda *_: None)
    return watched


def test_an_activity_is_reported_once_when_it_outlasts_the_limit(watched):
    with watched.watch(lambda: "reading"):
        watched.advance(10)
        assert watched.reports == []
        watched.advance(0.1)
        assert watched.reports == ["reading"]
        watched.advance(100)
    assert watched.reports == ["reading"]


def test_each_of_several_activities_has_its_own_time(watched):
    for name in ("first", "second"):
        with watched.watch(lambda name=name: name):
            watched.advance(9)
    watched.advance(100)
    assert watched.reports == []


@pytest.mark.parametrize(("inner_s", "reports"), [(9, ["outer"]), (11, ["inner", "outer"])])
def test_an_activity_stays_watched_when_one_inside_it_ends_which_is_reported_first(watched, inner_s, reports):
    with watched.watch(lambda: "outer"):
        with watched.watch(lambda: "inner"):
            watched.advance(inner_s)
        watched.advance(2)
    assert watched.reports == reports


def test_progress_starts_the_time_again(watched):
    places = iter([1, 2, 3, 3])
    with watched.watch(lambda: "walking", lambda: next(places)):
        for _ in range(3):
            watched.advance(9)
        assert watched.reports == []
        watched.advance(11)
    assert watched.reports == ["walking"]


def test_what_the_body_leaves_under_way_stays_watched_until_it_is_done(watched):
    place = "on the device"
    with watched.watch(lambda: f"hangs {place}", lambda: place):
        watched.advance(1)
    place = None
    watched.advance(1)
    place = "on the device"  # of another activity
    watched.advance(100)
    assert watched.reports == []
    with watched.watch(lambda: f"hangs {place}", lambda: place):
        watched.advance(1)
    watched.advance(9)
    assert watched.reports == []
    watched.advance(2)
    assert watched.reports == ["hangs on the device"]


def test_an_activity_that_failed_is_no_longer_watched(watched):
    with pytest.raises(KeyError), watched.watch(lambda: "failing"):
        raise KeyError
    watched.advance(100)
    assert watched.reports == []


@pytest.mark.parametrize("tells", [True, False])
def test_a_device_that_answers_with_errors_makes_no_progress_and_is_reported(watched, tells):
    """After an illegal access every query of an event raises, while the main thread may wait for other ranks for ever."""

    ask = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    with watched.watch((lambda: "stands still") if tells else ask, ask):
        watched.advance(9)
        assert watched.reports == []
        watched.advance(2)
        (report,) = watched.reports
        assert ("stands still" if tells else "RuntimeError: an illegal memory access was encountered") in report
        with watched.watch(lambda: "still watched"):
            watched.advance(11)
        assert watched.reports[1:] == ["still watched"]


class Training:
    def __init__(self):
        self.looks = threading.Semaphore(0)

    def progress(self):
        self.looks.release()
        return 1


def test_a_watchdog_keeps_nothing_that_it_has_watched_and_its_thread_ends_with_it():
    watchdog, training = Watchdog(0.04), Training()
    gone = weakref.ref(training)
    with watchdog.watch(lambda training=training: str(training), training.progress, limit_s=60.0):
        assert training.looks.acquire(timeout=60)
    watchdog._activities.clear()  # the device has passed it
    thread = watchdog._thread
    assert thread is not None
    del training
    end_s = time.monotonic() + 60
    while gone() is not None and time.monotonic() < end_s:  # until the look is over
        time.sleep(0.01)
    assert gone() is None
    assert thread.is_alive()
    del watchdog
    thread.join(60)
    assert not thread.is_alive()


def test_a_process_that_ends_tells_where_each_of_its_threads_stands():
    program = """
from megatron_epp.runtime.watchdog import Watchdog
import time
def waits_for_ever():
    with Watchdog(0.05).watch(lambda: "nothing comes"):
        time.sleep(60)
waits_for_ever()
"""
    ended = run_python(program)
    assert ended.returncode == watchdog_module.EXIT_CODE
    assert "nothing comes" in ended.stderr
    assert "in waits_for_ever" in ended.stderr


def test_a_process_ends_well_while_its_watchdog_asks_for_other_ranks_failures():
    program = """
import time
from torch.distributed import TCPStore
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.watchdog import Watchdog
class AskedAllTheTime(FailureBoard):
    def poll(self):
        return next(filter(None, (self.cause() for _ in range(1000))), "")
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with Watchdog(0.01, failures=AskedAllTheTime(store, 0, 2)).watch(lambda: "training", limit_s=60):
    time.sleep(0.2)
print("training is done")
"""
    ended = run_python(program)
    assert (ended.stdout, ended.returncode, ended.stderr) == ("training is done\n", 0, "")


class Queue:
    """A device that passes marks when it is told to."""

    def __init__(self):
        self.issued = self.passed = 0

    def mark(self):
        self.issued = number = self.issued + 1
        return SimpleNamespace(query=lambda: self.passed >= number)


def test_without_a_device_of_its_own_the_rank_is_where_the_host_is(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert device_mark() is None
    progress = Progress(device_mark)
    assert progress.point() == ProgressPoint(0)
    for point in (ProgressPoint(1, receiving=True), None):
        progress.reach(point)
        assert progress.point() == point


def test_with_a_device_it_is_at_the_first_place_the_device_has_not_passed():
    queue = Queue()
    progress = Progress(queue.mark)
    for point in (ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None):
        progress.reach(point)
    seen = [progress.point() for queue.passed in range(5)]
    assert seen == [ProgressPoint(0), ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None]


def test_a_host_that_gave_up_leaves_what_it_had_issued():
    queue = Queue()
    progress = Progress(queue.mark)
    progress.reach(ProgressPoint(1))
    progress.close()
    assert progress.point() == ProgressPoint(0)
    queue.passed = 1
    assert progress.point() is None
