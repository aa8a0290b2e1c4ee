"""A run passes where it is as near to the reference as Megatron's own, or near enough anyway."""

import math

import pytest

from megatron_epp.cli.first_run.training import deviation


def test_twice_as_far_as_megatrons_own_is_allowed_and_more_is_not():
    near = deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0079], floor=1e-6)
    assert near.theirs == pytest.approx(1e-3)
    assert near.allowed == pytest.approx(2e-3)
    assert near.holds
    assert not deviation([2.0, 4.0], [2.0, 4.004], [2.0, 4.0081], floor=1e-6).holds


def test_where_megatrons_own_is_exact_the_floor_is_allowed():
    assert deviation([2.0], [2.0], [2.00001], floor=1e-5).holds
    assert not deviation([2.0], [2.0], [2.0001], floor=1e-5).holds


def test_a_loss_that_is_not_a_number_passes_nowhere():
    found = deviation([2.0, 2.0], [2.0, 2.0], [2.0, math.nan], floor=1.0)
    assert math.isinf(found.ours)
    assert not found.holds
