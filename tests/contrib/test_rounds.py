"""Measurements in alternating rounds: medians, spread and doubt."""

import pytest

from megatron_epp.contrib.demos.rounds import Occupancy, Rounds, doubt, turns

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
