"""The benchmark of layouts in real runs, from end to end at tiny size: its figures are there and fit. No time is judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_epp.cost import Profile
from scripts.bench.layouts.compared import lines_of
from scripts.bench.layouts.emulated import emulate
from scripts.bench.layouts.real import LAYOUTS
from scripts.bench.layouts.trained import RANKS, Case, measure

pytestmark = pytest.mark.slow  # `test_bench_layouts_compared.py` in `pure` has ratios, verdicts and tables
TINY = Case(num_layers=5, vocab_size=2_048, hidden_size=64, context=64, sequences=6)


def test_all_layouts_train_the_same_batches_with_costs_that_were_profiled(tmp_path: Path) -> None:
    said: list[str] = []
    found, occupancy = measure(TINY, tmp_path, LAYOUTS, rounds=2, iterations=1, note=said.append)
    assert said[0] == "profiling the model"
    assert [text.split()[-1] for text in said[1:]] == [*LAYOUTS, *LAYOUTS[1:], LAYOUTS[0]]
    assert Profile.from_json((tmp_path / "profile.json").read_text()).attention is not None
    assert occupancy.num_ranks == RANKS
    assert occupancy.others is not None
    assert [one.name for one in found] == list(LAYOUTS)
    assert found[0].layers == "3, 2"
    for one in found:
        assert len(one.rounds) == 2
        assert sum(map(float, one.layers.split(", "))) == TINY.num_layers
        for each in one.rounds:
            assert each.own_us > 0
            assert each.planned_us > 0
            assert 0 < each.measured_us <= each.iteration_us * 1.001
    assert found[0].rounds[0].planned_us == found[0].rounds[1].planned_us
    assert found[2].rounds[0].planned_us <= found[0].rounds[0].planned_us * 1.005
    assert len(lines_of(found, occupancy)) == 1 + 2 * len(LAYOUTS) - 1


def test_emulated_ranks_run_both_layouts() -> None:
    found = emulate(4, seconds=1.0)
    assert found.layers["even"] == "8, 8, 8, 8"
    assert found.ratio("vocabulary").planned < found.ratio("auto").planned < 1
    for name, planned_us in found.planned_us.items():
        assert found.measured_us[name] >= planned_us * 0.999
