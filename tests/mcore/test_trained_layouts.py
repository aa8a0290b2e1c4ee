"""The benchmark of layouts in training, from end to end at tiny size: its figures are there and fit. No time is judged."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from scripts.bench.trained_layouts import FIGURES, LAYOUTS, Case, chosen_layers, row, shown

TINY = Case(num_layers=5, vocab_size=2_048, hidden_size=64, context=64, sequences=6)


@pytest.mark.slow
def test_all_layouts_train_the_same_batches_with_costs_that_were_profiled(tmp_path: Path) -> None:
    figures = row(Namespace(output=tmp_path, rounds=2, iterations=1), TINY)
    assert tuple(figures["layers"]) == LAYOUTS
    assert figures["layers"]["even"] == "3, 2"
    assert all(sum(map(float, layers.split(", "))) == TINY.num_layers for layers in figures["layers"].values())
    rounds = figures["rounds"]
    for of_layout in rounds.values():
        assert len(of_layout) == 2
        for each in of_layout:
            assert min(each["own_us"], each["planned_us"]) > 0
            assert 0 < each["measured_us"] <= each["iteration_us"] * 1.001
    assert rounds["even"][0]["planned_us"] == rounds["even"][1]["planned_us"]
    assert rounds["auto"][0]["planned_us"] <= rounds["even"][0]["planned_us"] * 1.005
    assert shown({"case": "tiny"} | figures).count("\n") >= 1 + len(LAYOUTS)


def test_ratios_are_those_of_the_medians_and_named_uncertain_where_times_overlap() -> None:
    def rounds(planned_us: float, *measured_us: float) -> list[dict[str, float]]:
        return [dict(zip(FIGURES, (planned_us, us, us + 10_000, us), strict=True)) for us in measured_us]

    figures = {
        "layers": {"even": "3, 2", "auto": "3.5, 1.5", "vocabulary": "2.5, 2.5"},
        "rounds": {
            "even": rounds(400_000, 410_000, 404_000, 500_000),
            "auto": rounds(350_000, 360_000, 355_000, 357_000),
            "vocabulary": rounds(350_000, 360_000, 355_000, 404_000),
        },
        "occupancy": {"others": 0.1, "num_ranks": 2, "num_cores": 2},
    }
    lines = shown(figures).splitlines()
    assert lines[3].endswith(f"| 0.875 | {357 / 410:.3f} ({357 / 410 / 0.875 - 1:+.1%}) | {357 / 410:.3f} (-0.5%) |")
    assert lines[-2] == "auto / even: the times do not overlap"
    assert lines[-1] == "vocabulary / even: inconclusive: the measured times overlap"


def test_layers_are_those_that_the_log_names() -> None:
    log = "INFO: --epp-layout auto: stages of 3.5, 1.5 layers, 12.0% less time than even layers for batches like the first 8"
    assert chosen_layers(Case(), "auto", log) == "3.5, 1.5"
    assert chosen_layers(Case(num_layers=5), "even", "") == "3, 2"
    with pytest.raises(AssertionError, match="does not say which layers"):
        chosen_layers(Case(), "balanced", "nothing of it")
