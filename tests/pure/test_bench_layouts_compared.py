"""Layouts planned and measured: ratios, the verdict on them, and the tables of the two parts of the benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.contrib.demos.rounds import Occupancy
from scripts.bench.layouts.compared import Measured, Ratio, Trained, ratio, verdict
from scripts.bench.layouts.trained import Case, chosen_layers

QUIET = Occupancy(0.1, num_ranks=2, num_cores=2)


def measured(name: str, layers: str, planned_us: float, *rounds_us: float) -> Measured:
    """Trainings whose iterations take 10 ms more than the makespan, and their actions all of it."""
    return Measured(name, layers, tuple(Trained(planned_us, us, us, us + 10_000) for us in rounds_us))


EVEN = measured("even", "3, 2", 400_000, 410_000, 404_000, 500_000)
AUTO = measured("auto", "3.5, 1.5", 350_000, 360_000, 355_000, 357_000)


def test_ratios_are_those_of_the_medians() -> None:
    found = ratio(AUTO, EVEN)
    assert found == Ratio(350 / 400, 357 / 410)
    assert found.error == pytest.approx((357 / 410) / (350 / 400) - 1)
    assert ratio(AUTO, EVEN, "iteration_us").measured == pytest.approx(367 / 420)
    assert EVEN.measured_us.spread == pytest.approx(96 / 410)


@pytest.mark.parametrize(
    ("auto", "others", "says"),
    [
        (AUTO, 0.1, "as planned, within 5%"),
        (AUTO, 0.6, "inconclusive: the machine was busy (other programs took 0.6 of 2 cores)"),
        (
            measured("auto", "3.5, 1.5", 350_000, 360_000, 406_000),
            0.1,
            "inconclusive: the measured times overlap",
        ),
        (measured("auto", "3.5, 1.5", 300_000, 360_000, 361_000), 0.1, "not as planned: more than 5%"),
        (measured("auto", "3.5, 1.5", 390_000, 360_000, 361_000), 0.1, "not as planned: more than 5%"),
        (measured("auto", "3, 2", 400_000, 600_000), 2.0, "the same layers as even"),
    ],
)
def test_a_verdict_is_given_only_where_the_machine_was_quiet(auto: Measured, others: float, says: str) -> None:
    assert verdict(auto, EVEN, replace(QUIET, others=others)).startswith(says)


def test_layers_are_those_that_the_log_names() -> None:
    log = "INFO: --epp-layout auto: stages of 3.5, 1.5 layers, 12.0% less time than even layers for batches like the first 8"
    assert chosen_layers(Case(), "auto", log) == "3.5, 1.5"
    assert chosen_layers(Case(num_layers=5), "even", "") == "3, 2"
    with pytest.raises(AssertionError, match="does not say which layers"):
        chosen_layers(Case(), "balanced", "nothing of it")
