"""Formulas have every tensor that a layer of Megatron keeps for its backward, and no other."""

from itertools import product
from typing import Any

import pytest

from megatron_epp.plan.yaml_files import shipped
from megatron_epp.tools.formulas.library import load_flags
from tests.support.mcore.forked import job, returned

BYTES_OF_A_CHUNK = 512
"""Kept of a chunk however long it is: counts of experts' tokens, scalars of losses."""
SMALL = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 20,
    "num_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 32,
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "window_size": "(8,0)", "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_num_groups": 2, "mamba_state_dim": 16,
}  # fmt: skip
_BEARS = (
    "no_", "moe_", "bf16", "swiglu", "normalization", "position", "rotary", "disable", "add_", "qk_", "group_", "multi_",
    "rope", "linear_", "experimental_", "hybrid_", "mamba_", "squared_",
)  # fmt: skip
"""Beginnings of other flags of the shipped models that bear on what a layer keeps."""
_LEFT_OUT = ("moe_layer_freq", "moe_grouped_gemm", "no_gradient_accumulation_fusion", "no_persist_layer_norm")
NEEDS_TE = "moonlight-16b-a3b"
"""Latent attention with norms and without a latent of queries, which Megatron builds with Transformer Engine alone."""


def small(flags: dict[str, Any]) -> list[str]:
    bears = {name: value for name, value in flags.items() if name.startswith(_BEARS) and name not in _LEFT_OUT}
    sizes = {name: value for name, value in SMALL.items() if name in flags or name in ("ffn_hidden_size", "kv_channels")}
    if "kv_lora_rank" in flags:
        del sizes["kv_channels"]
    words = []
    for name, value in (bears | sizes).items():
        words += [f"--{name.replace('_', '-')}"] * (value is not False) + [str(value)] * (not isinstance(value, bool))
    return [*words, *CPU]


CPU = ["--hidden-dropout", "0", "--attention-dropout", "0", "--transformer-impl", "local"]
LLAMA = {
    "normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "disable_bias_linear": True, "bf16": True,
}  # fmt: skip
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LATENT = {"multi_latent_attention": True, **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 8)}
LATENT |= {"qk_pos_emb_head_dim": 8, "v_head_dim": 20, "rope_type": "rope", "qk_layernorm": True}
EXPERTS = {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 8, "moe_token_dispatcher_type": "alltoall"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
SHARED = {"moe_shared_expert_intermediate_size": 32}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
ATTENTION = {
    "all heads": {}, "grouped": GROUPED, "qk norms": GROUPED | {"qk_layernorm": True},
    "biases": GROUPED | {"add_qkv_bias": True}, "a gate": GROUPED | {"attention_output_gate": True},
    "not fused": GROUPED | {"qk_layernorm": True, "no_rope_fusion": True, "no_bias_swiglu_fusion": True}, "latents": LATENT,
    "delta nets": DELTA, "delta nets, heads shared": DELTA | {"linear_num_value_heads": 4},
}  # fmt: skip
MLP = {
    "dense": {},
    "biases": {"disable_bias_linear": False},
    "experts": EXPERTS,
    "balanced": EXPERTS | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001},
    "sigmoid": EXPERTS | SIGMOID | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.001},
    "groups": EXPERTS | SIGMOID | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "shared": EXPERTS | SHARED,
    "shared, a gate": EXPERTS | SHARED | {"moe_shared_expert_gate": True},
}
CASES = {f"{one}, {other}": small(SIZES | LLAMA | ATTENTION[one] | MLP[other]) for one, other in product(ATTENTION, MLP)}
MAMBA = {f"mamba_{name}": SMALL[f"mamba_{name}"] for name in ("num_heads", "head_dim", "num_groups", "state_dim")}
ALONE = LLAMA | GROUPED | MAMBA | {name: value for name, value in DELTA.items() if name.startswith("linear_")}
CASES |= {f"{part} alone": small(SIZES | ALONE | {"hybrid_layer_pattern": part}) for part in "*GM-"}
CASES |= {"E alone": small(SIZES | ALONE | EXPERTS | {"hybrid_layer_pattern": "E"})}
CASES |= {"gpt2": small(SIZES), "gpt2, qk norms, not fused": small(SIZES | {"qk_layernorm": True, "no_bias_gelu_fusion": True})}
for name in shipped("models"):
    flags = load_flags(name)
    if flags.get("squared_relu"):
        flags |= {"no_bias_gelu_fusion": True}  # as Megatron sets it where it checks flags
    parts = sorted(set(flags.get("hybrid_layer_pattern", "")))  # of a hybrid model every layer is one of these alone
    CASES |= {f"{name}, {part}": small(flags | {"hybrid_layer_pattern": part}) for part in parts} or {name: small(flags)}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return dict(zip(CASES, returned(job(1, "activations", cases=list(CASES.values()))), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != NEEDS_TE])
def test_a_layer_keeps_what_the_formulas_have(found: dict[str, dict[str, Any]], name: str) -> None:
    figures = found[name]
    assert "error" not in figures, figures
    assert figures["measured"] == pytest.approx(figures["planned"], abs=1e-6), "\n".join(figures["tensors"])
    assert 0 <= figures["constant"] <= BYTES_OF_A_CHUNK


def test_one_kind_of_the_shipped_models_is_built_with_transformer_engine_alone(found: dict[str, dict[str, Any]]) -> None:
    assert "qk_layernorm requires TransformerEngine" in found[NEEDS_TE]["error"]
