"""Measurements in alternating rounds: medians, spread and doubt."""

import pytest

from megatron_epp.report.rounds import Rounds, doubt, is_busy, turns

FAST, SLOW = Rounds((10.0, 9.0, 12.0)), Rounds((20.0, 19.0, 25.0))


def test_a_figure_has_a_median_a_range_and_a_spread():
    assert (FAST.median, FAST.range) == (10.0, (9.0, 12.0))
    assert FAST.spread == pytest.approx(0.3)


def test_every_round_has_each_name_once_and_begins_with_another():
    assert list(turns("abc", 4)) == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


def test_a_load_above_that_of_the_ranks_is_busy():
    assert [is_busy(load, 2) for load in (0.0, 2.5, 2.51)] == [False, False, True]


def test_a_difference_is_doubted_where_the_machine_was_busy_or_ranges_overlap():
    assert doubt(FAST, SLOW, 2.0, 2) == ""
    assert "(load 3.0 with 2 ranks)" in doubt(FAST, SLOW, 3.0, 2)
    assert "overlap" in doubt(FAST, Rounds((12.0, 30.0)), 2.0, 2)
    assert "one round" in doubt(FAST, Rounds((30.0,)), 2.0, 2)
