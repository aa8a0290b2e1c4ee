"""Work in a thread next to a rank's actions: in order, with its errors, and without keeping a failed rank alive."""

import pytest

from megatron_epp.runtime.side_thread import SideThread
from tests.support.calls import run_python

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
