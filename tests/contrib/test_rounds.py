"""Measurements in alternating rounds: medians, spread and doubt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, ProcessorTime, Rounds, doubt, turns

FAST, SLOW = Rounds((10.0, 9.0, 12.0)), Rounds((20.0, 19.0, 25.0))


def test_a_figure_has_a_median_a_range_and_a_spread():
    assert (FAST.median, FAST.range) == (10.0, (9.0, 12.0))
    assert FAST.spread == pytest.approx(0.3)


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
    assert doubt(FAST, SLOW, quiet) == ""
    assert "(other programs took 1.0 of 2 cores)" in doubt(FAST, SLOW, busy)
    assert "overlap" in doubt(FAST, Rounds((12.0, 30.0)), quiet)
    assert "one round" in doubt(FAST, Rounds((30.0,)), quiet)


TICKS = os.sysconf("SC_CLK_TCK")
STOLEN_ONLY = "cpu  0 0 0 900 9 0 0 50 0 0\n"


def system(folder: Path, stat: str, **processes: tuple[int, int, str]) -> Path:
    """Write the files of a system.

    Args:
        processes: by ``p`` and the number: parent, ticks of its own, and its name. Each has a tick of ended children.
    """
    (folder / "stat").write_text(stat)
    for process, (parent, ticks, name) in processes.items():
        (folder / process[1:]).mkdir()
        fields = ["S", parent, *[0] * 9, ticks - 1, 1, 1, 0, *[7] * 37]
        (folder / process[1:] / "stat").write_text(f"{process[1:]} ({name}) {' '.join(map(str, fields))}\n")
    return folder


def test_time_of_all_programs_counts_everything_but_idle_cores(tmp_path):
    folder = system(tmp_path, "cpu  10 20 30 9000 900 40 50 60 5 5\ncpu0 1 1 1 1\n")
    assert ProcessorTime.read(folder).all_s == pytest.approx(210 / TICKS)


def test_own_time_is_that_of_this_process_and_of_all_below_it(tmp_path):
    own = {f"p{os.getpid()}": (1, 100, "python"), "p7": (os.getpid(), 10, "a rank) S 1 (x"), "p8": (7, 5, "planner")}
    found = ProcessorTime.read(system(tmp_path, STOLEN_ONLY, p1=(0, 7000, "init"), p9=(1, 800, "others"), **own))
    assert found.own_s == pytest.approx((100 + 10 + 5 + 3) / TICKS)
    assert found.all_s == pytest.approx(50 / TICKS)


@pytest.mark.parametrize("stat", [None, "", "cpu  0 0 0 0 0 0 0 0 0 0\n", "intr 5\n"])
def test_a_system_that_does_not_tell_has_no_figures(tmp_path, stat):
    folder = tmp_path if stat is None else system(tmp_path, stat)
    assert ProcessorTime.read(folder) is None


def test_what_this_program_uses_is_not_that_of_others():
    before, after = ProcessorTime(10.0, 500.0, 40.0), ProcessorTime(20.0, 518.0, 57.0)
    assert after.cores_of_others_since(before) == pytest.approx(0.1)
    assert ProcessorTime(20.0, 517.0, 57.5).cores_of_others_since(before) == 0.0


@pytest.mark.skipif(ProcessorTime.read() is None, reason="needs /proc/stat of Linux with figures")
def test_time_of_a_process_that_this_one_started_is_its_own_and_stays_so_when_it_has_ended():
    before = ProcessorTime.read()
    work = "import time\nwhile time.process_time() < 0.3: pass"
    others = OthersMeter()
    with others.measured():
        subprocess.run([sys.executable, "-c", work], check=True)
    assert ProcessorTime.read().own_s - before.own_s >= 0.3 - 2 / TICKS
    occupancy = others.occupancy(num_ranks=1)
    assert 0.0 <= occupancy.others <= occupancy.num_cores
    assert (occupancy.num_ranks, occupancy.num_cores) == (1, os.cpu_count())


def test_without_a_measurement_the_load_of_others_is_unknown():
    assert OthersMeter().occupancy(num_ranks=2).others is None
