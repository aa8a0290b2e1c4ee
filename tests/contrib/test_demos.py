"""Demonstrations and benchmarks measure in alternating rounds, and put a run beside its plan."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_epp.contrib.demos import rounds
from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, doubt, turns
from megatron_epp.tools.launch.runs import RecordedRun
from scripts.bench.alone import replayed_us
from tests.support.plan.report_plans import measured_run, sliced_plan

FAST, SLOW = (10.0, 9.0, 12.0), (20.0, 19.0, 25.0)


def test_every_round_has_each_name_once_and_begins_with_another():
    assert list(turns("abc", 4)) == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "quiet", "busy"),
    [(2, 2, 0.19, 0.21), (8, 2, 0.19, 0.21), (2, 64, 62.1, 62.3), (16, 16, 1.5, 1.7)],
)
def test_a_machine_is_busy_where_others_take_more_than_spare_cores_and_a_tenth_of_the_ranks(num_ranks, num_cores, quiet, busy):
    assert not Occupancy(quiet, num_ranks, num_cores).is_busy
    assert Occupancy(busy, num_ranks, num_cores).is_busy
    assert not Occupancy(None, num_ranks, num_cores).is_busy


def test_a_difference_is_doubted_where_the_machine_was_busy_or_ranges_overlap():
    quiet, busy = (Occupancy(others, num_ranks=2, num_cores=2) for others in (0.1, 1.0))
    assert doubt(FAST, SLOW, quiet) == doubt(FAST, SLOW, Occupancy(None, num_ranks=2, num_cores=2)) == ""
    assert "(other programs took 1.0 of 2 cores)" in doubt(FAST, SLOW, busy)
    assert "overlap" in doubt(FAST, (12.0, 30.0), quiet)
    assert "one round" in doubt(FAST, (30.0,), quiet)


@pytest.mark.skipif(rounds._others_s() is None, reason="needs /proc/stat of Linux with figures")
def test_time_of_a_process_that_this_one_started_and_waited_for_is_its_own():
    work, before = "import time\nwhile time.process_time() < 0.3: pass", sum(os.times()[:4])
    others = OthersMeter()
    with others.measured():
        subprocess.run([sys.executable, "-c", work], check=True)
    assert sum(os.times()[:4]) - before >= 0.28
    occupancy = others.occupancy(num_ranks=1)
    assert 0.0 <= occupancy.others <= occupancy.num_cores
    assert (occupancy.num_ranks, occupancy.num_cores) == (1, os.cpu_count())


def test_slow_actions_show_in_the_replay_and_late_ones_do_not():
    plan = sliced_plan(num_ranks=3)
    slow = measured_run(plan, slowdown=1.25)
    rows = (tuple(e._replace(start_us=e.start_us + 70.0, end_us=e.end_us + 70.0) for e in row) for row in slow.ranks)
    assert replayed_us(plan, replace(slow, ranks=tuple(rows))) == pytest.approx(slow.makespan_us)


def test_a_run_has_the_rate_of_its_iterations_after_the_first_two_and_the_highest_peak_of_every_rank():
    lines = tuple({"loss": 4.0 - i, "tokens": 100, "peak_activation_bytes": [3 + i, 5 - i]} for i in range(4))
    run = RecordedRun(lines, (50.0, 50.0, 20.0, 5.0))
    assert run.tokens_per_second == pytest.approx(200 / 0.025)
    assert RecordedRun(lines[:1], (50.0,)).tokens_per_second == 2_000
    assert run.peak_activation_bytes == [6, 5]
    assert run.losses == [4.0, 3.0, 2.0, 1.0]
