"""The watchdog, with a clock that the test turns."""

import subprocess
import sys
import threading
import time
import weakref

import pytest

from megatron_epp.runtime import watchdog as watchdog_module
from megatron_epp.runtime.watchdog import Progress, ProgressPoint, Watchdog, device_mark


class Clock:
    """Takes the place of the time module in the watchdog; the watchdog looks once per `advance`."""

    def __init__(self):
        self._strangers = {*threading.enumerate()} - {
            threading.current_thread()
        }  # watchdogs that earlier tests left running keep the real time
        self.now_s = 0.0
        self._may_look, self._sleeps = threading.Semaphore(0), threading.Semaphore(0)

    def monotonic(self):
        return time.monotonic() if threading.current_thread() in self._strangers else self.now_s

    def sleep(self, seconds):
        if threading.current_thread() in self._strangers:
            time.sleep(seconds)
            return
        self._sleeps.release()
        self._may_look.acquire()

    def advance(self, seconds):
        """Let time pass, then let the watchdog look and go back to sleep."""
        assert self._sleeps.acquire(timeout=60)
        self.now_s += seconds
        self._may_look.release()
        assert self._sleeps.acquire(timeout=60)
        self._sleeps.release()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watchdog_module, "time", clock)
    return clock


def test_an_activity_is_reported_once_when_it_outlasts_the_limit(clock):
    reports = []
    with Watchdog(10, reports.append).watch(lambda: "reading"):
        clock.advance(10)
        assert reports == []
        clock.advance(0.1)
        assert reports == ["reading"]
        clock.advance(100)
    assert reports == ["reading"]


def test_each_of_several_activities_has_its_own_time(clock):
    reports = []
    watchdog = Watchdog(10, reports.append)
    for name in ("first", "second"):
        with watchdog.watch(lambda name=name: name):
            clock.advance(9)
    clock.advance(100)
    assert reports == []


def test_an_activity_stays_watched_when_one_inside_it_ends(clock):
    reports = []
    watchdog = Watchdog(10, reports.append)
    with watchdog.watch(lambda: "outer"):
        with watchdog.watch(lambda: "inner"):
            clock.advance(9)
        clock.advance(2)
    assert reports == ["outer"]


def test_of_two_that_lie_inside_each_other_the_inner_is_reported_first(clock):
    reports = []
    watchdog = Watchdog(10, reports.append)
    with watchdog.watch(lambda: "outer"), watchdog.watch(lambda: "inner"):
        clock.advance(11)
    assert reports == ["inner", "outer"]


def test_progress_starts_the_time_again(clock):
    reports = []
    places = iter([1, 2, 3, 3])
    with Watchdog(10, reports.append).watch(lambda: "walking", lambda: next(places)):
        for _ in range(3):
            clock.advance(9)
        assert reports == []
        clock.advance(11)
    assert reports == ["walking"]


def test_what_the_body_leaves_under_way_stays_watched_until_it_is_done(clock):
    reports = []
    place = "on the device"
    watchdog = Watchdog(10, reports.append)
    with watchdog.watch(lambda: f"hangs {place}", lambda: place):
        clock.advance(1)
    clock.advance(9)
    assert reports == []
    clock.advance(2)
    assert reports == ["hangs on the device"]


def test_what_the_body_leaves_under_way_is_forgotten_when_it_is_done(clock):
    reports = []
    place = "on the device"
    watchdog = Watchdog(10, reports.append)
    with watchdog.watch(lambda: "hangs", lambda: place):
        clock.advance(1)
    place = None
    clock.advance(1)
    place = "nothing of its business"
    clock.advance(100)
    assert reports == []


def test_an_activity_that_failed_is_no_longer_watched(clock):
    reports = []
    watchdog = Watchdog(10, reports.append)
    with pytest.raises(KeyError), watchdog.watch(lambda: "failing"):
        raise KeyError
    clock.advance(100)
    assert reports == []


@pytest.mark.parametrize("tells", [True, False])
def test_a_device_that_answers_with_errors_makes_no_progress_and_is_reported(clock, tells):
    """After an illegal access every query of an event raises, while the main thread may wait for other ranks for ever."""
    reports = []

    def ask():
        raise RuntimeError("an illegal memory access was encountered")

    watchdog = Watchdog(10, reports.append)
    with watchdog.watch(lambda: "stands still" if tells else ask(), ask):
        clock.advance(9)
        assert reports == []
        clock.advance(2)
        expected = "stands still" if tells else "RuntimeError: an illegal memory access was encountered"
        assert len(reports) == 1
        assert expected in reports[0]
        with watchdog.watch(lambda: "still watched"):
            clock.advance(11)
        assert reports[1:] == ["still watched"]


class Training:
    """Something to watch, which says when it has been looked at."""

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
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
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
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "training is done\n"
    assert (ended.returncode, ended.stderr) == (0, "")


class Queue:
    """A device that passes marks when it is told to."""

    def __init__(self):
        self.issued = self.passed = 0

    def mark(self):
        self.issued += 1
        return Mark(self, self.issued)


class Mark:
    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def query(self):
        return self.queue.passed >= self.number


def test_without_a_device_of_its_own_the_rank_is_where_the_host_is():
    progress = Progress(lambda: None)
    assert progress.point() == ProgressPoint(0)
    progress.reach(ProgressPoint(1, receiving=True))
    assert progress.point() == ProgressPoint(1, receiving=True)
    progress.reach(None)
    assert progress.point() is None


def test_with_a_device_it_is_at_the_first_place_the_device_has_not_passed():
    queue = Queue()
    progress = Progress(queue.mark)
    for point in (ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None):
        progress.reach(point)
    seen = []
    for queue.passed in range(5):
        seen.append(progress.point())
    assert seen == [ProgressPoint(0), ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None]


def test_a_host_that_gave_up_leaves_what_it_had_issued():
    queue = Queue()
    progress = Progress(queue.mark)
    progress.reach(ProgressPoint(1))
    progress.close()
    assert progress.point() == ProgressPoint(0)
    queue.passed = 1
    assert progress.point() is None


def test_a_processor_has_no_queue_to_mark(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert device_mark() is None
