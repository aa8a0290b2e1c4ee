"""Parameters counted from flags are those that models are known by."""

from dataclasses import replace
from itertools import accumulate, pairwise
from operator import attrgetter

import pytest

from megatron_epp.cost.blocks import HEAD, PREDICTION
from megatron_epp.cost.memory import WORKING
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.cost.work import work_of
from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.tools.cli import main
from megatron_epp.tools.formulas import H100, ModelShape, Profile, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.analytic import profile_for
from megatron_epp.tools.formulas.library import check_formulas, load_flags, shape_of
from megatron_epp.tools.formulas.model_shape import Exchange, RecurrentShape
from megatron_epp.tools.formulas.parameters import kinds_of_layers, parameters_of, summary

SLICES = work_of([Chunk((Segment(0, at, at + 64),)) for at in (0, 64, 128)], [192])
BILLIONS = {
    "qwen2.5-7b": 7.62, "qwen2.5-32b": 32.8, "qwen3-8b": 8.19, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235, "deepseek-v3": 671, "kimi-k2": 1026, "moonlight-16b-a3b": 16.0, "glm-4.5-air": 106,
    "nemotron-3-nano": 31.6, "granite-4-h-small": 32.2, "gpt-oss-120b": 117, "gpt-oss-20b": 20.9, "olmo-3-32b": 32.2,
    "qwen3-next-80b-a3b": 80, "qwen3.5-27b": 27, "qwen3.5-35b-a3b": 35, "llama3-8b": 8.03, "llama3-70b": 70.6,
    "llama3.1-405b": 405.9, "mixtral-8x7b": 46.7,
}  # fmt: skip


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shipped_model_has_the_parameters_that_it_is_known_by(name: str):
    assert parameters_of(load_flags(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_a_mamba_mixer_has_the_parameters_of_its_projections_and_its_convolution():
    """Mamba-2 with 2,048 channels: 64 heads of 64 channels, one group of 128 states, a convolution over 4 tokens."""
    sizes = {"mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_num_groups": 1, "mamba_state_dim": 128}
    model = {"num_layers": 1, "hidden_size": 2048, "num_attention_heads": 32, "vocab_size": 1, "hybrid_layer_pattern": "M"}
    projections = 2048 * (2 * 4096 + 2 * 128 + 64) + 4096 * 2048
    assert parameters_of(sizes | model) == 2048 + projections + 4 * (4096 + 2 * 128)


@pytest.mark.parametrize(("frequency", "has"), [("([0]*2+[1]*3)", "00111"), ("[0,1]", "01010"), (2, "10101")])
def test_layers_with_experts_are_read_as_megatron_reads_them(frequency, has):
    layers = kinds_of_layers(shape_of(_SIZES | {"num_layers": 5, "moe_layer_freq": frequency}))
    assert [mlp == "E" for _, mlp in layers] == [digit == "1" for digit in has]


_SIZES = {
    "num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1024,
    "bf16": True, "swiglu": True, "num_experts": 8, "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 16, "make_vocab_size_divisible_by": 128,
}  # fmt: skip


@pytest.mark.parametrize("frequency", [1, 2, "([0]*3+[1]*5)", "[0]*8", [0, 1, 1, 1, 1, 1, 0, 1]])
@pytest.mark.parametrize("layers", [[2, 2, 2, 2], [1, 3, 4]])
def test_stages_hold_the_parameters_of_the_layers_that_they_have_and_of_no_others(frequency, layers):
    flags = _SIZES | {"moe_layer_freq": frequency}
    costs = analytic_costs(shape_of(flags), H100, layers, state_bytes_per_parameter=2)
    counted = analytic_profile(shape_of(flags), H100).costs(layers, optimizer=OptimizerBytes.of_flags(flags))
    vocabulary, ends = 1024 * 64, [0.0, *accumulate(layers)]
    attention, dense, routed = 4 * 64 * 64, 3 * 64 * 256, 64 * 8 + 3 * 64 * (16 + 8 * 32)
    kinds = [mlp for _, mlp in kinds_of_layers(shape_of(flags))]
    for stage, (start, end) in enumerate(pairwise(ends)):
        count = vocabulary * ((stage == 0) + (stage == len(layers) - 1))
        for layer, kind in enumerate(kinds):
            count += attention * (start <= layer < end) + (routed if kind == "E" else dense) * (start <= layer + 0.5 < end)
        assert costs.stages[stage].static_bytes == pytest.approx(2 * count, abs=2)
        assert counted.stages[stage].static.weights == pytest.approx(2 * count, abs=2)
    assert sum(stage.static_bytes for stage in costs.stages) == pytest.approx(2 * parameters_of(flags) + 2 * vocabulary, abs=8)


def test_times_and_bytes_of_a_stage_are_those_of_its_layers():
    dense, mixed, routed = (
        analytic_costs(shape_of(_SIZES | {"moe_layer_freq": frequency}), H100, [4, 4]).stages[0].layers
        for frequency in ("[0]*8", "[0,0,0,1]", 1)
    )
    for name in ("forward", "backward", "weight"):
        of_dense, of_mixed, of_routed = (getattr(layers, name).per_token_us for layers in (dense, mixed, routed))
        assert of_mixed == pytest.approx(0.75 * of_dense + 0.25 * of_routed)
        assert of_dense != of_routed
    assert mixed.bytes_per_token == pytest.approx(0.75 * dense.bytes_per_token + 0.25 * routed.bytes_per_token)
    assert mixed.full_bytes_per_token == max(dense.bytes_per_token, routed.bytes_per_token)


def test_a_profile_of_layers_of_two_kinds_is_kept_as_json():
    profile = analytic_profile(shape_of(_SIZES | {"moe_layer_freq": 2}), H100)
    assert profile.dense_layers == (1, 3, 5, 7)
    assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(EppError, match="has 4 layers without experts, and the model 0"):
        profile_for(profile, shape_of(_SIZES), H100)
    with pytest.raises(EppError, match="there is no dense_layer"):
        Profile.from_json(replace(profile, dense_layer=None).to_json())


def test_a_model_is_described_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path):
    said = summary(load_flags("deepseek-v3"))
    assert said.startswith("61 layers of 7,168, latent attention, 256 experts in 58, 8 for each token, multi-token prediction")
    assert said.endswith(": 671.0B parameters without it")
    sizes = '"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16'
    (tmp_path / "config.json").write_text(f'{{"model_type": "qwen3", "vocab_size": 1000, {sizes}}}')
    assert main.main(["plan", "--model", str(tmp_path), "--lengths", "100,30", "--stages", "2"]) == 0
    assert "4 layers of 64, attention: " in capsys.readouterr().err


def test_kinds_of_layers_multi_token_prediction_are_costs_of_the_last_stage():
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 100, "num_layers": 4}
    bare, ahead = (analytic_costs(ModelShape(**sizes, predictions=depths), H100, [2, 2]) for depths in (0, 2))
    assert ahead.stages[0] == bare.stages[0]
    *_, prediction, head = ahead.stages[1].blocks
    assert (prediction.kind, prediction.count, head.kind) == (PREDICTION, 2, HEAD)
    assert [stage.num_cached_layers for stage in ahead.stages] == [2, 4]
    assert head.forward.per_token_us == pytest.approx(3 * bare.stages[1].blocks[-1].forward.per_token_us)
    layer = bare.stages[1].layers
    assert prediction.forward.per_pair_us == pytest.approx(2 * layer.forward.per_pair_us)
    assert prediction.bytes_per_token > 2 * layer.bytes_per_token
    more = ahead.stages[1].static_bytes - bare.stages[1].static_bytes
    assert more > 2 * layer.count * 18 * 64 * 64  # its layers, and a copy of the embedding


@pytest.mark.parametrize(("name", "pattern"), [("qwen3-next-80b-a3b", None), ("nemotron-3-nano", "/*E/*E")])
def test_predictions_attend_in_models_of_which_few_layers_do(name: str, pattern: str | None):
    flags = load_flags(name) | {"mtp_num_layers": 2}
    if pattern:
        flags |= {"hybrid_layer_pattern": flags["hybrid_layer_pattern"] + pattern}
    check_formulas(flags)
    shape = shape_of(flags)
    *_, prediction, _ = analytic_costs(shape, H100, [shape.num_layers]).stages[0].blocks
    assert prediction.kind == PREDICTION
    held = prediction.count * prediction.kv.bytes_per_token
    assert 2 * shape.kv_bytes_per_token <= held < 2 * shape.kv_bytes_per_token + prediction.kv.bytes_per_token


def test_windows_count_by_the_tokens_in_them():
    flags = load_flags("gpt-oss-120b")
    check_formulas(flags)
    narrow, wide = (analytic_profile(shape_of(flags | more), H100) for more in ({}, {"window_size": None}))
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token / 2
    assert narrow.handed_bytes == 127 / 2 * wide.kv_bytes_per_token
    assert narrow.layer.forward.per_pair_us == wide.layer.forward.per_pair_us / 2
    of_window = narrow.layer.forward.per_token_us - wide.layer.forward.per_token_us
    assert of_window == pytest.approx(127 / 2 * wide.layer.forward.per_pair_us)
    first, second, last = narrow.costs([18, 18]).stages[0].blocks[1].kept_bytes(SLICES)
    assert (first, second, last) == (18 * narrow.handed_bytes * 64 / 127, 18 * narrow.handed_bytes, 0)


def test_gated_delta_nets_hand_on_states_in_the_place_of_keys_and_values_which_ranks_share():
    flags = load_flags("qwen3-next-80b-a3b")
    check_formulas(flags)
    mixed, attends = (analytic_profile(shape_of(flags | more), H100) for more in ({}, {"experimental_attention_variant": None}))
    assert mixed.kv_bytes_per_token == attends.kv_bytes_per_token / 4
    assert mixed.layer.forward.per_pair_us == attends.layer.forward.per_pair_us / 4
    state, rows = 4 * 32 * 128 * 128, 2 * 3 * (2 * 16 + 32) * 128
    assert mixed.handed_bytes == 0.75 * (state + rows)
    assert tuple(mixed.costs([24, 24]).stages[0].blocks[1].kept_bytes(SLICES)) == (24 * mixed.handed_bytes,) * 2 + (0,)
    again, of_attention = (profile.layer.recompute["selective"].again.per_token_us for profile in (mixed, attends))
    assert again > 0.75 * of_attention
    shared = analytic_profile(shape_of(flags | {"tensor_model_parallel_size": 4}), H100)
    assert shared.handed_bytes == mixed.handed_bytes / 4
    assert shared.layer.parameters < mixed.layer.parameters


def test_a_recurrence_multiplies_with_its_state_and_in_a_block_and_its_ranks_exchange_all_but_their_own_tokens():
    delta = RecurrentShape.of(shape_of(load_flags("qwen3-next-80b-a3b")), "G")
    mamba = RecurrentShape.of(shape_of(load_flags("nemotron-3-nano")), "M")
    assert delta.net.rule_products == 32 * (3 * 128 * 128 + 64 * (3 * 128 + 2 * 128))
    assert mamba.net.rule_products == 2 * 64 * 64 * 128 + 128 * (64 * 64 + 8 * 128)
    for shape in (delta, mamba):
        width = shape.net.exchanged_width + shape.net.value_width
        for ranks in (1, 2, 4):
            _, heads = replace(shape, context_parallel=ranks).attention_exchanges
            assert heads == Exchange((ranks - 1) / ranks * 2 * width / ranks, ranks, 1)


def test_layers_of_a_hybrid_model_are_the_mean_of_those_with_one_part_each():
    flags = load_flags("nemotron-3-nano")
    check_formulas(flags)
    whole, *parts = (analytic_profile(shape_of(flags | {"hybrid_layer_pattern": part}), H100) for part in ("ME*E", *"MEE*"))
    for profile in (whole, *parts):
        assert Profile.from_json(profile.to_json()) == profile
    lines = [f"{name}.{of}" for name in ("forward", "backward", "weight", "exchange") for of in ("per_token_us", "per_pair_us")]
    for name in (*lines, "bytes_per_token", "weight_bytes_per_token", "parameters", "expert_parameters"):
        own, *others = (attrgetter(name)(profile.layer) for profile in (whole, *parts))
        assert own == pytest.approx(sum(others) / 4)
    for mode in ("selective", "mlp"):
        own, *others = (profile.layer.recompute[mode].bytes_per_token for profile in (whole, *parts))
        assert own == pytest.approx(sum(others) / 4)
    assert whole.kv_bytes_per_token == parts[-1].kv_bytes_per_token / 4
    assert [profile.kv_bytes_per_token for profile in parts[:-1]] == [0, 0, 0]
    assert whole.layer.largest_weight == max(profile.layer.largest_weight for profile in parts)


def test_mamba2_hands_on_states_which_ranks_share():
    flags = load_flags("nemotron-3-nano") | {"hybrid_layer_pattern": "M*"}
    alone, shared = (analytic_profile(shape_of(flags | {"tensor_model_parallel_size": ranks}), H100) for ranks in (1, 2))
    states, rows = 4 * 64 * 64 * 128, 2 * 3 * (64 * 64 + 2 * 8 * 128)
    assert (alone.handed_bytes, shared.handed_bytes) == ((states + rows) / 2, alone.handed_bytes / 2)
    assert tuple(alone.costs([1, 1]).stages[0].blocks[1].kept_bytes(SLICES)) == (alone.handed_bytes,) * 2 + (0,)


def test_while_it_runs_a_device_holds_what_the_kernel_of_mamba2_makes_in_its_backward():
    flags = load_flags("nemotron-3-nano") | {"hybrid_layer_pattern": "M"}
    mixed, projected = 64 * 64 + 2 * 8 * 128, 2 * 64 * 64 + 2 * 8 * 128 + 64
    states = 64 * 64 * 128 / 128  # of a block of 128 tokens, per token
    in_fp32 = 4 * (3 * 64 + 8 * 128) + 2 * 4 * states
    held = 2 * (projected + 2 * mixed + 2 * states) + in_fp32
    layout, adam = Layout((2, 2), Placement("looped", 2, 1)), OptimizerBytes.of_flags({})
    work = work_of([Chunk((Segment(0, 0, 3000),))], [3000])
    for ranks in (1, 2):
        profile = analytic_profile(shape_of(flags | {"tensor_model_parallel_size": ranks}), H100)
        (running,) = profile.costs_on_device(layout, adam, 1, 0.0).pass_items(0, work)[WORKING]
        assert running == 3000 * (held / ranks + 2 * 2688) > 3000 * profile.layer.bytes_per_token


def test_windows_of_a_hybrid_model_count_in_its_layers_of_attention():
    flags = load_flags("nemotron-3-nano") | {"hybrid_layer_pattern": "M*M*", "window_size": "(8,0)"}
    assert shape_of(flags | {"window_attn_skip_freq": 4}).window_share == 0.5
    assert shape_of(flags).window_share == 1.0


@pytest.mark.parametrize("frequency", [4, "4", "([1]*3+[0])", [1, 1, 1, 0]])
def test_the_last_of_so_many_layers_attends(frequency):
    flags = load_flags("qwen3.5-27b") | {"linear_attention_freq": frequency, "num_layers": 10}
    assert "".join(mixer for mixer, _ in kinds_of_layers(shape_of(flags))) == "GGG*GGG*GG"
    assert shape_of(flags).share_of("G") == 0.8


BAD_FREQUENCIES = ("import os", "[0]*99999999999", "[0.5]", "(", "[0]*[1]")
BAD_WINDOWS = ("(0,5)", "(-1,0)", "8", "(8,0,0)")


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        *(("moonlight-16b-a3b", {"moe_layer_freq": value}, "is no list of layers") for value in BAD_FREQUENCIES),
        *(("gpt-oss-120b", {"window_size": value}, "are for windows of tokens ahead and none behind") for value in BAD_WINDOWS),
        ("moonlight-16b-a3b", {"group_query_attention": True, "num_query_groups": 2}, "keys and values for every head"),
        ("nemotron-3-nano", {"mamba_num_groups": 3}, "mamba_num_heads 64 cannot share mamba_num_groups 3 evenly"),
        ("nemotron-3-nano", {"num_attention_heads": 96, "tensor_model_parallel_size": 3}, "64 heads of Mamba-2 cannot be"),
        ("qwen3.5-27b", {"linear_attention_freq": None}, "needs linear_attention_freq"),
        ("qwen3.5-27b", {"linear_num_value_heads": 24}, "linear_num_value_heads 24 and linear_num_key_heads 16"),
        ("qwen3.5-27b", {"context_parallel_size": 3}, "16 key heads of gated delta nets cannot be shared evenly by 1 tensor-"),
    ],
)
def test_a_model_that_cannot_be_or_has_no_formula_is_refused(model, change, message):
    with pytest.raises(EppError, match=message):
        shape_of(load_flags(model) | change)
