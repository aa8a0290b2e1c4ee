"""The report of the quickstart's three runs, from runs whose figures are given."""

import pytest

from megatron_epp.cli.quickstart import compare, text
from megatron_epp.launch.runs import Run


def run(losses, tokens, iteration_ms, peaks=((100, 50),)):
    lines = tuple(
        {
            "loss": loss,
            "tokens": tokens,
            "peak_activation_bytes": list(peaks[number % len(peaks)]),
            "bubble_fraction": {"planned": 0.1 * (number + 1), "measured": 0.2 * (number + 1)},
        }
        for number, loss in enumerate(losses)
    )
    return Run(lines, tuple(iteration_ms))


STOCK = run([4.0, 2.0, 1.0], 100, [50.0, 20.0, 10.0], [(3 << 20, 1 << 20), (2 << 20, 4 << 20)])
WHOLE = run([4.0, 2.0, 1.0], 100, [50.0, 20.0, 5.0])
EPP = run([4.0, 2.2, 1.0], 100, [50.0, 20.0, 4.0])


def test_a_run_has_the_rate_of_its_iterations_after_the_first_two_and_the_highest_peak_of_every_rank():
    assert STOCK.tokens_per_second() == 10_000
    assert STOCK.tokens_per_second(skip=1) == 7_500
    assert run([1.0], 100, [50.0]).tokens_per_second() == 2_000
    assert STOCK.peak_activation_bytes == [3 << 20, 4 << 20]
    assert STOCK.losses == [4.0, 2.0, 1.0]


def test_losses_rates_peaks_and_bubbles_are_compared():
    report = compare(STOCK, WHOLE, EPP)
    assert report["iterations"] == 3
    assert report["max_relative_loss_difference"] == pytest.approx(0.1)
    assert report["tokens_per_second"] == {"stock": 10_000, "whole": 20_000, "epp": 25_000}
    assert report["peak_activation_bytes"] == {"stock": 4 << 20, "whole": 100, "epp": 100}
    assert report["bubble_fraction"] == pytest.approx({"planned": 0.25, "measured": 0.5})
    assert report["losses"]["epp"] == EPP.losses


def test_the_tables_have_an_iteration_and_a_run_per_row():
    shown = text(compare(STOCK, WHOLE, EPP))
    rows = [line.split() for line in shown.splitlines()]
    assert ["2", "2.0000000", "2.2000000", "1.0e-01"] in rows
    assert ["stock", "10,000", "4.0", "MiB"] in [row[:4] for row in rows]
    assert "largest relative difference of the losses: 1.0e-01" in shown
    assert "25.0% planned, 50.0% measured" in shown
