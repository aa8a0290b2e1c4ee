"""Precision and dropout with plans: the same training as with Megatron's own schedule, or as without recompute."""

import math

import pytest

from tests.support.mcore.forked import job, returned


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found = returned(job(1, "options", folder=tmp_path_factory.mktemp("options"), timeout_s=900))
    errors = {name: figures["error"] for name, figures in found.items() if "error" in figures}
    assert not errors, errors
    return found


def apart(expected, found):
    """Norm of the difference of all weights over their norm."""
    assert expected["weights"].keys() == found["weights"].keys()
    pairs = [(x, y) for name, row in expected["weights"].items() for x, y in zip(row, found["weights"][name], strict=True)]
    return math.sqrt(sum((x - y) ** 2 for x, y in pairs) / sum(x * x for x, _ in pairs))


def test_layers_that_recompute_draw_the_same_dropout_again(runs):
    """Where other tokens meet the masks, losses of this model are 1e-4 apart."""
    plain, recomputed = runs["dropout"], runs["dropout, recompute"]
    assert plain["forwards"] == recomputed["forwards"]  # or other tokens would meet other masks
    assert plain["chunks"] == recomputed["chunks"]
    assert {tuple(plan["recompute"]) for plan in plain["plans"]} == {("none",)}
    assert {tuple(plan["recompute"]) for plan in recomputed["plans"]} == {("all",)}
    assert any("split" in plan["kinds"] for plan in plain["plans"])
    assert recomputed["losses"] == plain["losses"]
    assert recomputed["weights"] == plain["weights"]
    assert plain["losses"] != runs["elastic"]["losses"]


@pytest.mark.parametrize("name", ["bf16 elastic", "bf16 elastic, fp32 gradients of keys", "fp16 elastic"])
def test_half_precision_is_no_further_from_fp32_than_megatrons_own_is(runs, name):
    """In bf16 Megatron accumulates gradients in fp32, in fp16 as they are."""
    exact, stock, elastic = runs["stock"], runs[f"{name[:4]} stock"], runs[name]
    assert elastic["gradient_dtypes"] == stock["gradient_dtypes"] == ["torch.float32" if "bf16" in name else "torch.float16"]
    assert max(abs(a / b - 1) for a, b in zip(exact["losses"], elastic["losses"], strict=True)) < 2.0**-12
    rounding = apart(exact, stock)
    assert apart(exact, elastic) < 1.1 * rounding
    assert apart(stock, elastic) < rounding
