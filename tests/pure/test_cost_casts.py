"""Formulas of layers in FP8: bytes of casts, and times of products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.cost import CPU, H100, OptimizerBytes, Profile, analytic_costs, analytic_profile
from megatron_epp.cost.analytic import profile_for
from megatron_epp.cost.casts import RECIPES, casts_of
from megatron_epp.cost.library import load_cluster, shape_of
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement

LLAMA = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512, "swiglu": True, "bf16": True}
TENSORWISE = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
PLAIN, CAST = shape_of(LLAMA), shape_of(LLAMA | TENSORWISE)
HIDDEN, INSIDE = PLAIN.hidden_size, PLAIN.ffn_hidden_size


def test_flags_of_training_and_of_model_files_name_the_recipe() -> None:
    assert casts_of(TENSORWISE) is casts_of({"fp8": "e4m3", "fp8_recipe": "tensorwise"}) is RECIPES["tensorwise"]
    assert casts_of({"fp8_recipe": "mxfp8"}) is None
    with pytest.raises(EppError, match="FP8 by tensorwise, blockwise or mxfp8, not by delayed"):
        casts_of({"fp8_format": "hybrid"})


@pytest.mark.parametrize("name", RECIPES)
def test_weights_of_layers_have_two_casts_that_stay(name: str) -> None:
    cast = shape_of(LLAMA | TENSORWISE | {"fp8_recipe": name})
    plain, in_fp8 = (analytic_costs(shape, H100, [3, 1]).stages for shape in (PLAIN, cast))
    for count, one, other in zip((3, 1), plain, in_fp8, strict=True):
        bytes_more = count * PLAIN.layer_parameters * RECIPES[name].weight_bytes
        assert other.static == replace(one.static, weights=one.static.weights + int(bytes_more))


def test_measured_costs_get_the_casts_of_weights() -> None:
    optimizer = OptimizerBytes.of_flags({"bf16": True})
    measured = Profile.from_json(analytic_profile(PLAIN, H100).to_json())
    in_fp8 = profile_for(measured, CAST, H100)
    plain, more = (profile.costs([4], optimizer=optimizer).stages[0].static.weights for profile in (measured, in_fp8))
    assert more - plain == 2 * 4 * PLAIN.layer_parameters
    assert Profile.from_json(in_fp8.to_json()) == in_fp8


def test_linear_layers_keep_a_byte_of_what_they_alone_need() -> None:
    """Inputs of attention's first projection and of both of an MLP. Experts and latent attention keep theirs as they are."""
    assert PLAIN.layer_bytes_per_token - CAST.layer_bytes_per_token == 2 * HIDDEN + INSIDE
    assert PLAIN.attended_bytes_per_token - CAST.attended_bytes_per_token == HIDDEN
    assert CAST.moved_bytes_per_token == PLAIN.moved_bytes_per_token
    experts = LLAMA | {"num_experts": 4, "moe_ffn_hidden_size": 64}
    assert shape_of(experts | TENSORWISE).saved_bytes_per_token == HIDDEN
    latents = experts | {"multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
    assert shape_of(latents | {"v_head_dim": 8} | TENSORWISE).saved_bytes_per_token == 0


def test_a_layer_that_runs_holds_gradients_that_are_not_cast() -> None:
    assert CAST.layer_bytes_per_token + CAST.uncast_bytes_per_token == PLAIN.layer_bytes_per_token
    layout, optimizer = Layout.of_layers([4], Placement("looped", 1, 1)), OptimizerBytes.of_flags({"bf16": True})
    costs = [analytic_profile(shape, H100).costs_on_device(layout, optimizer, 1).stages[0].layers for shape in (PLAIN, CAST)]
    assert costs[0].working_bytes_per_token == costs[1].working_bytes_per_token > costs[1].bytes_per_token
    one_dense = shape_of(LLAMA | TENSORWISE | {"num_experts": 4, "moe_layer_freq": [0, 1, 1, 1]})
    assert one_dense.uncast_bytes_per_token == 2 * HIDDEN + INSIDE


def test_products_of_layers_are_faster_where_the_speed_is_known() -> None:
    for rates in (H100, CPU):
        plain, cast = (analytic_profile(shape, rates) for shape in (PLAIN, CAST))
        saved_us = plain.layer.forward.per_token_us - cast.layer.forward.per_token_us
        products_us = 1e6 * 2 * PLAIN.layer_parameters / rates.linear_flops
        assert saved_us == pytest.approx(products_us * (1 - 1 / rates.fp8_speedup), abs=1e-12)
        assert cast.head.forward == plain.head.forward
    assert [load_cluster(name).rates.fp8_speedup for name in ("h100x8", "a100x8")] == [H100.fp8_speedup, 1]
