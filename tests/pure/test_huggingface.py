"""A Hugging Face config says Megatron's flags, or in one line what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.plan import EppError
from megatron_epp.tools.formulas.huggingface import flags_of_config
from megatron_epp.tools.formulas.library import check_formulas, load_flags, shape_of
from tests.support.calls import refusal

DENSE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1_000_000,
    "tie_word_embeddings": False,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "num_nextn_predict_layers": 1, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
NARROW: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
    "num_experts_per_tok": 4, "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip
GATED_DELTA: dict[str, Any] = {
    "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
STATES: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 21504, "hybrid_override_pattern": "M-M-M-M*-M-", "num_hidden_layers": 11,
}  # fmt: skip


MISTRAL = DENSE | {"model_type": "mistral"}
QWEN_3_5 = GATED_DELTA | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (DENSE, {"num_layers": 36, "ffn_hidden_size": 12288, "rotary_base": 1_000_000, "kv_channels": 128}),
        (DENSE, {"group_query_attention": True, "num_query_groups": 8, "swiglu": True, "qk_layernorm": True}),
        (DENSE, {"untie_embeddings_and_output_weights": True, "window_size": None, "num_experts": None}),
        (DENSE | {"head_dim": None, "hidden_size": 6400}, {"kv_channels": 200}),
        (LATENT, {"multi_latent_attention": True, "kv_lora_rank": 512, "qk_pos_emb_head_dim": 64, "rotary_scaling_factor": 40}),
        (LATENT, {"moe_layer_freq": "([0]*3+[1]*58)", "moe_shared_expert_intermediate_size": 2048, "mtp_num_layers": 1}),
        (LATENT, {"moe_router_num_groups": 8, "moe_router_topk_scaling_factor": 2.5}),
        (DENSE | {"sliding_window": 1024, "use_sliding_window": False}, {"window_size": None}),
        (DENSE | {"sliding_window": None, "use_sliding_window": True}, {"window_size": None}),
        (DENSE | {"use_sliding_window": True}, {"window_size": "(4095,0)"}),  # the usual one
        (MISTRAL, {"window_size": "(4095,0)"}),
        (MISTRAL | {"sliding_window": None}, {"window_size": None}),
        (GATED_DELTA, {"experimental_attention_variant": "gated_delta_net", "rotary_percent": 0.25}),
        (GATED_DELTA, {"linear_attention_freq": f"({'+'.join(['[1]*3+[0]*1'] * 12)})", "moe_shared_expert_gate": True}),
        (QWEN_3_5, {"num_experts": None, "mtp_num_layers": 1}),
        (STATES, {"hybrid_layer_pattern": "M-M-M-M*-M-", "num_layers": 11, "squared_relu": True}),
    ],
)
def test_a_config_becomes_flags(config: dict[str, Any], wanted: dict[str, Any]):
    flags = flags_of_config(config)
    assert {name: flags.get(name) for name in wanted} == wanted


def test_windows_of_every_second_layer_become_the_layers_that_have_none():
    flags = flags_of_config(NARROW)
    assert (flags["window_size"], flags["window_attn_skip_freq"]) == ("(127,0)", 2)
    assert flags_of_config({name: value for name, value in NARROW.items() if name != "layer_types"}) == flags
    kinds = ["full_attention", *["sliding_attention"] * 35]
    assert flags_of_config(NARROW | {"layer_types": kinds})["window_attn_skip_freq"] == "([0]*1+[1]*35)"


_SLIDES = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 8}
_LISTED = {"layer_types": ["full_attention"] * 8 + ["sliding_attention"] * 28}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


@pytest.mark.parametrize(
    ("model_type", "change", "layers"),
    [
        ("qwen2", _SLIDES, "([0]*8+[1]*28)"),
        ("qwen3", _SLIDES, "([0]*8+[1]*28)"),
        ("qwen3", {**_SLIDES, **_LISTED, "max_window_layers": 3}, "([0]*8+[1]*28)"),
        ("qwen3_moe", {**_SLIDES, **_EXPERTS}, None),
        ("llama", {"sliding_window": 1024, **_LISTED}, "([0]*8+[1]*28)"),
        ("glm4_moe", {"sliding_window": 1024, **_LISTED, **_EXPERTS}, "([0]*8+[1]*28)"),
        ("minimax_m2", {"sliding_window": 1024, **_LISTED, **_EXPERTS}, "([0]*8+[1]*28)"),
    ],
)
def test_windows_of_every_kind_of_model_become_flags_and_are_not_planned_as_full_attention(model_type, change, layers):
    flags = flags_of_config(DENSE | {"model_type": model_type, **change})
    assert (flags["window_size"], flags.get("window_attn_skip_freq")) == ("(1023,0)", layers)
    shape = shape_of(flags)
    assert shape.window == 1023
    assert shape.window_share == (1.0 if layers is None else 28 / 36)


def test_a_list_of_layers_is_taken_in_the_place_of_a_pattern():
    listed = {name: value for name, value in STATES.items() if name != "hybrid_override_pattern"}
    for states, attention in (("mamba", "attention"), ("linear_attention", "full_attention")):
        kinds = [states, "mlp"] * 3 + [states, attention, "mlp", states, "mlp"]
        assert flags_of_config(listed | {"layers_block_type": kinds}) == flags_of_config(STATES)


def test_a_folder_and_a_file_are_taken_where_a_model_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert load_flags(str(tmp_path)) == load_flags(str(tmp_path / "config.json")) == flags_of_config(DENSE)


@pytest.mark.parametrize(
    ("body", "change", "said"),
    [
        (DENSE, {"model_type": "qwen4"}, "did you mean 'qwen"),
        (DENSE, {"model_type": None}, "known are llama"),
        (DENSE, {"num_key_value_heads": 7}, "num_attention_heads 32 cannot share num_key_value_heads 7"),
        (DENSE, {"head_dim": None, "hidden_size": 4100}, "not a multiple of num_attention_heads 32"),
        (DENSE, {"num_hidden_layers": "36"}, "num_hidden_layers: '36' is not a whole number"),
        (DENSE, {"vocab_size": None}, "there is no vocab_size"),
        (DENSE, {"hidden_act": "gelu"}, "only silu"),
        (DENSE, {"tie_word_embeddings": "no"}, "neither true nor false"),
        (DENSE, {"rope_scaling": 4}, "rope_scaling: 4 is not an object"),
        (LATENT, {"num_experts_per_tok": 300}, "num_experts_per_tok 300 is more than the 256 experts"),
        (LATENT, {"first_k_dense_replace": 62}, "first_k_dense_replace 62 is more than the 61 layers"),
        (LATENT, {"n_group": 7}, "256 experts in n_group 7 groups"),
        (LATENT, {"kv_lora_rank": 0}, "kv_lora_rank: 0 is not a whole number from 1"),
        (DENSE, {"model_type": "llama", "layer_types": ["sliding_attention"] * 36}, "sliding_window does not say how wide"),
        (NARROW, {"layer_types": ["full_attention"]}, "layer_types lists 1 layers, where num_hidden_layers says 36"),
        (NARROW, {"layer_types": ["chunked_attention"] * 36}, "layer_types has 'chunked_attention'"),
        (STATES, {"hybrid_override_pattern": "MX*"}, "its layers have 'X'"),
        (DENSE, {"model_type": "qwen3_vl", "text_config": {}}, "a model of several modalities"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused_in_one_line(body: dict[str, Any], change: dict[str, Any], said: str):
    assert said in refusal(flags_of_config, body | change)


LATENT_EXPERTS = STATES | {
    "hybrid_override_pattern": "ME*EMEMEMEM", "moe_latent_size": 1024, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
}  # fmt: skip


def test_layers_without_a_formula_are_not_planned_as_others():
    unknown = flags_of_config(STATES) | {"hybrid_layer_pattern": "MD"}
    for flags, named in ((unknown, "layers D"), (flags_of_config(LATENT_EXPERTS), "moe_latent_size 1024")):
        with pytest.raises(EppError, match=f"there is no formula for {named}"):
            check_formulas(flags)


def test_a_file_that_is_no_config_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EppError, match=r"config\.json: a Hugging Face config is an object, not \[\]"):
        load_flags(str(tmp_path))
