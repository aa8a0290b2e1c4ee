"""The comparison with public measurements: the plans are of the measured training, and rates are those of its figures."""

from dataclasses import replace

import pytest

from megatron_epp.cost import H100
from scripts.bench.public.bench import FOUND, QWEN3_8B, compared, lines, planned

(TRL,) = FOUND
SHORT = replace(TRL, tokens=1 << 16, step_s=3.0)


@pytest.fixture(scope="module")
def found():
    return compared(SHORT)


def test_the_plan_is_of_the_measured_sizes_with_every_layer_recomputed(found):
    made = planned(SHORT)
    assert found.recomputed
    assert made.lengths == (1 << 16,)
    assert made.num_ranks == 1
    assert sum(made.num_layers) == QWEN3_8B["num_layers"]
    assert found.planned_s == made.predicted.makespan_us / 1e6


def test_the_plan_has_the_mean_of_the_rates_and_a_measurement_what_the_rest_leaves(found):
    forward, backward = H100.attention_forward_flops / 1e12, H100.attention_backward_flops / 1e12
    assert backward < found.planned_rate < forward
    assert found.planned_rate == pytest.approx(18 / (8 / forward + 10 / backward))
    assert found.measured_rate * (SHORT.step_s - found.rest_s) == pytest.approx(found.attention_tflops)
    assert 0 < found.rest_s < found.planned_s


def test_a_device_attends_to_its_share_of_the_pairs(found):
    pairs = (1 << 16) * ((1 << 16) + 1) / 2
    assert found.attention_tflops == pytest.approx(18 * 32 * 128 * 36 * pairs / 8 / 1e12)


def test_measured_and_planned_stand_in_one_table_with_the_source(found):
    text = "\n".join(lines(SHORT, found, None))
    assert "measured (Hugging Face TRL, pull request 6846)  CP 8" in text
    assert f"{found.planned_s:.0f} s" in text
    assert f"it ran at {found.measured_rate:.0f} TFLOP/s" in text
    assert "(FSDP)" in text
    assert (TRL.tokens, TRL.devices, TRL.step_s, TRL.memory_gb) == (1048576, 8, 380.0, 56.2)
