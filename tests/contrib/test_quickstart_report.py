"""The demonstration prints its verdicts from the figures of its trainings, which are given here."""

from dataclasses import replace

import pytest

from megatron_epp.contrib.demos.quickstart.parts import LongDocument, Parity, Schedule, SkewedDocuments
from megatron_epp.contrib.demos.quickstart.texts import figures, long_lines, parity_lines, ratios, skewed_lines, summary
from megatron_epp.contrib.demos.rounds import Occupancy, Rounds
from megatron_epp.launch.runs import RecordedRun
from tests.support.plan.report_plans import sliced_plan

MIB = 1 << 20
PARITY = Parity(((5.5, 5.5), (5.0, 5.00005)), 2e-7)
QUIET = Occupancy(0.1, num_ranks=2, num_cores=2)
WHOLE = Schedule(Rounds((9_000.0, 10_000.0, 11_000.0)), 137 * MIB, 4.5e6, 4.2e6, (5.8, 5.7))
ELASTIC = Schedule(Rounds((14_000.0, 13_000.0, 15_000.0)), 116 * MIB, 3.0e6, 3.0e6, (5.8, 5.7))
SKEWED = SkewedDocuments(WHOLE, ELASTIC, QUIET, 123 * MIB)
LONG = LongDocument((8192, 90, 80), 116 * MIB, 52 * MIB, 46 * MIB, 47 * MIB, 51 * MIB, ((5.0, 5.0),), sliced_plan(num_ranks=2))


def said() -> str:
    return "\n".join(summary(PARITY, SKEWED, LONG))


def test_a_run_has_the_rate_of_its_iterations_after_the_first_two_and_the_highest_peak_of_every_rank():
    lines = tuple({"loss": 4.0 - i, "tokens": 100, "peak_activation_bytes": [3 + i, 5 - i]} for i in range(4))
    run = RecordedRun(lines, (50.0, 50.0, 20.0, 5.0))
    assert run.tokens_per_second == pytest.approx(200 / 0.025)
    assert RecordedRun(lines[:1], (50.0,)).tokens_per_second == 2_000
    assert run.peak_activation_bytes == [6, 5]
    assert run.losses == [4.0, 3.0, 2.0, 1.0]


def test_ratios_are_planned_measured_and_by_processor_time():
    assert ratios(SKEWED) == pytest.approx({"planned": 1.5, "measured": 1.4, "by_processor_time": 1.4})
    assert ratios(replace(SKEWED, whole=replace(WHOLE, own_us=None)))["by_processor_time"] is None


def test_the_planned_ratio_is_beside_the_measured_one_and_losses_side_by_side():
    shown = skewed_lines(SKEWED)
    assert "elastic plans train 1.40 times as fast, 1.50 planned, 1.40 by processor time alone" in shown
    assert ["1", "5.8000000", "5.8000000", "0.0e+00"] in [line.split() for line in shown]
    assert "1F1B, whole documents    10,000   9,000  11,000     20%        137.00 MiB" in shown


@pytest.mark.parametrize(
    ("others", "rates", "reason"),
    [
        (1.0, (14_000.0, 13_000.0), "inconclusive: the machine was busy (other programs took 1.0 of 2 cores): "),
        (0.1, (14_000.0, 10_500.0), "inconclusive: the measured times overlap: "),
        (0.1, (14_000.0,), "inconclusive: one round has no spread: "),
        (None, (14_000.0, 13_000.0), "elastic plans train"),
    ],
)
def test_a_difference_that_is_not_certain_is_called_inconclusive(others, rates, reason):
    found = replace(SKEWED, occupancy=replace(QUIET, others=others), elastic=replace(ELASTIC, tokens_per_second=Rounds(rates)))
    assert any(line.startswith(reason) for line in skewed_lines(found))


def test_losses_a_long_documents_peaks_and_where_it_would_tie_are_told():
    assert parity_lines(PARITY)[-1].endswith("differs by at most 2.0e-07 of its norm")
    assert "losses are equal within 1e-05, gradients equal within 2e-07" in said()
    shown = "\n".join(long_lines(LONG))
    assert "they need 51.00 MiB at least" in shown
    assert "would run whole documents" in "\n".join(long_lines(replace(LONG, needed_bytes=None)))
    assert "8,192 tokens among 2 short ones: whole documents take 52.00 MiB" in said()
    assert "Elastic plans trained them in 46.00 MiB; losses are equal." in said()
    assert "a tie where documents have similar lengths" in said()


def test_the_report_has_every_figure():
    report = figures(PARITY, SKEWED, LONG)
    assert report["parity"]["max_relative_loss_difference"] == pytest.approx(1e-5)
    assert report["skewed"]["schedules"]["elastic plans"]["tokens_per_second"] == (14_000.0, 13_000.0, 15_000.0)
    assert report["skewed"]["occupancy"] == {"others": 0.1, "num_ranks": 2, "num_cores": 2}
    assert report["skewed"]["elastic_over_whole"]["measured"] == pytest.approx(1.4)
    assert report["long_document"]["elastic_bytes"] == 46 * MIB
