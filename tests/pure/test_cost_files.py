"""Files of models, clusters and costs, also Hugging Face's: shipped, older, of runs, and bad ones."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost.balance import spreads
from megatron_epp.cost.kept import FILE_NAME, KeptCosts, from_state, to_state
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.whole_microbatches import of_whole_microbatches
from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.plan.layout import even_layers
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.yaml_files import find, shipped
from megatron_epp.planner.chunks.chunker import own_parts
from megatron_epp.tools.formulas import CPU, H100, ModelShape, Profile, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.huggingface import flags_of_config
from megatron_epp.tools.formulas.library import balanced_layers, check_formulas, load_cluster, load_costs, load_flags, shape_of
from tests.support.calls import refusal

GOLDEN = Path(__file__).parent.parent / "golden"
BY_HAND = {"kind": "layer"} | {
    way: {"fixed_us": fixed_us, "per_token_us": us} for way, fixed_us, us in (("forward", 9.0, 1.0), ("backward", 19.0, 2.0))
}


def by_hand(version: int = 2, **changes: Any) -> str:
    """Return a file of one stage of one block; a change to None leaves a field out."""
    stages = [{"blocks": [BY_HAND | {"bytes_per_token": 100.0, "kv": {"bytes_per_token": 16.0}} | changes]}]
    body = {"schema": "megatron-epp/costs", "version": version, "name": "by hand", "hidden_bytes_per_token": 4.0}
    return json.dumps(body | {"stages": stages})


def test_a_file_gives_its_costs_back():
    """The file has two stages of a model, with the vocabulary in shards."""
    costs = PipelineCosts.from_json((GOLDEN / "costs_version_2.json").read_text())
    assert costs.vocabulary is not None
    assert PipelineCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"kind": None}, r"stages\[0\].blocks\[0\].kind is missing"),
        ({"kv": {"heads": 2}}, r"kv.bytes_per_token is missing"),
        ({"layer_flops": 5}, r"layer_flops is unknown"),
        ({"kind": "norm"}, r"kind is 'norm'"),
        ({"bytes_per_token": "much"}, r"bytes_per_token: 'much' is not a number"),
        ({"forward": 7}, r"forward is 7"),
        ({"weight": {"fixed_us": 99.0}}, r"weight is above the backward"),
    ],
)
def test_a_wrong_file_is_refused(changes: dict[str, Any], error: str):
    with pytest.raises(EppError, match=error):
        PipelineCosts.from_json(by_hand(**changes))


def test_files_of_other_versions_are_refused():
    for version in (0, 1, 3):
        error = f"version {version}, where this reads 'megatron-epp/costs' 2.; write one with `megatron-epp profile`"
        with pytest.raises(EppError, match=error):
            PipelineCosts.from_json(by_hand(version))


SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=128)
KEPT = KeptCosts(replace(analytic_costs(SHAPE, CPU, [2, 2]), name="learnt"), {"--fp16": False, "layers of stages": [2, 2]})


def test_a_state_gives_back_equal_costs_also_after_json() -> None:
    state = to_state([KEPT, replace(KEPT, learnt_with={})])
    assert from_state(json.loads(json.dumps(state))) == (KEPT, replace(KEPT, learnt_with={}))
    assert from_state(to_state([])) == ()


def test_an_obstacle_names_each_difference_with_both_values() -> None:
    assert KEPT.obstacle(dict(KEPT.learnt_with)) == ""
    assert KEPT.obstacle({"--fp16": True, "layers of stages": [2, 2]}) == "--fp16 was False and is True"
    assert KEPT.obstacle({"device": "cpu", "layers of stages": [1, 3]}) == (
        "--fp16 was False and is not told, device was not told and is cpu, layers of stages was [2, 2] and is [1, 3]"
    )


STATE = to_state([KEPT])
LEARNT = STATE["pipelines"][0]["costs"]
BAD: dict[str, tuple[Any, str]] = {
    "no dictionary": ([1], "not a dictionary"),
    "another schema": ({**STATE, "schema": "x"}, "schema 'x' version 1"),
    "a later version": ({**STATE, "version": 2}, "version 2"),
    "no list": ({**STATE, "pipelines": 3}, "pipelines is 3, which is not a list"),
    "no fingerprint": ({**STATE, "pipelines": [{"costs": LEARNT}]}, r"pipelines\[0\].learnt_with is missing"),
    "no costs": ({**STATE, "pipelines": [{"learnt_with": {}}]}, r"pipelines\[0\].costs is missing"),
    "other costs": ({**STATE, "pipelines": [{"learnt_with": {}, "costs": {}}]}, r"\[0\].costs: not a cost profile"),
}


@pytest.mark.parametrize("case", BAD)
def test_anything_else_is_refused_by_what_it_is(case: str) -> None:
    state, reason = BAD[case]
    with pytest.raises(EppError, match=reason):
        from_state(state)


def test_the_file_of_a_run_that_learnt_costs_is_a_file_of_costs(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(to_state([KEPT]), indent=1))
    assert load_costs(str(path)) == KEPT.costs


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        ([], "learnt costs of 0 pipelines"),
        ([KEPT, KEPT], "learnt costs of 2 pipelines"),
        ([replace(KEPT, costs=of_whole_microbatches(KEPT.costs))], "a script's own microbatches"),
    ],
)
def test_learnt_costs_that_are_not_those_of_one_training_on_documents_are_refused(tmp_path, kept, reason) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(to_state(kept)))
    with pytest.raises(EppError, match=f"{FILE_NAME}.*{reason}"):
        load_costs(str(path))


def test_all_shipped_files_load():
    assert {"llama3-8b", "llama3-70b", "llama2-13b", "llama-30b", "tiny-gpt"} <= set(shipped("models"))
    assert {"h100x8", "h200x8", "a100x8", "this-machine"} <= set(shipped("clusters"))
    for name in shipped("models"):
        assert shape_of(load_flags(name)).num_layers > 0
    for name in shipped("clusters"):
        assert load_cluster(name).rates.name == name


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_the_shipped_profiles_say_that_they_are_formulas_and_are(model: str):
    profile = load_costs(f"{model}-h100")
    assert isinstance(profile, Profile)
    assert profile.origin["source"].startswith("analytic")
    assert profile == analytic_profile(shape_of(load_flags(model)), load_cluster("h100x8").rates)


def test_megatrons_defaults_fill_in_what_a_model_leaves_out():
    tiny = shape_of(load_flags("tiny-gpt"))
    assert tiny.ffn_hidden_size == 128  # of a gated MLP: 8/3 of the width, rounded down to a multiple of 64
    assert tiny.vocab_size == 384  # padded to a multiple of 128
    assert tiny.bytes_per_value == 4
    assert tiny.num_query_groups is None
    plain = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 128}
    assert shape_of(plain).ffn_hidden_size == 256
    assert shape_of(plain | {"bf16": True, "tensor_model_parallel_size": 2, "vocab_size": 129}).vocab_size == 256
    assert shape_of(plain | {"num_query_groups": 1}).num_query_groups is None  # without --group-query-attention
    experts = shape_of(plain | {"num_experts": 4, "moe_ffn_hidden_size": 32})
    assert (experts.num_experts, experts.experts_per_token, experts.ffn_hidden_size) == (4, 2, 32)


def test_rotations_without_a_fused_kernel_count_in_measurements():
    flags = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    rope = {"position_embedding_type": "rope"}
    assert [shape_of(flags | more).rotates for more in ({}, rope, rope | {"no_rope_fusion": True})] == [False, False, True]
    assert shape_of(load_flags("tiny-gpt")).rotates


def test_a_cluster_starts_from_known_rates_and_changes_some(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text("rates: cpu\nlinear_flops: 5e9\ndevice_memory_gb: 3\n")
    cluster = load_cluster(str(path))
    assert (cluster.rates.linear_flops, cluster.rates.message_bytes) == (5e9, CPU.message_bytes)
    assert (cluster.device_memory_gb, load_cluster("h100x8").rates.linear_flops) == (3, H100.linear_flops)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rates: abacus", "abacus.*h100, cpu"), ("flops: 3", "unknown flops"), ("linear_flops: fast", "linear_flops is 'fast'"),
        ("linear_flops: -1", "must be a number from 1"), ("- a list", "holds no `name: value` pairs"), ("a: [", "not YAML"),
    ],
)  # fmt: skip
def test_a_cluster_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(EppError, match=message):
        load_cluster(str(path))


def test_a_model_that_lacks_something_is_refused_and_an_unknown_name_with_the_known_ones(tmp_path: Path):
    path = tmp_path / "model.yaml"
    path.write_text("hidden_size: 3")
    assert "hidden_size, a whole number" in refusal(shape_of, {"num_layers": 2})
    assert "no `megatron:`" in refusal(load_flags, str(path))
    assert re.search("no file gpt5.*llama3-8b", refusal(find, "models", "gpt5"))


def test_without_yaml_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(EppError, match="pip install pyyaml"):
        load_flags("llama3-8b")


LLAMA = analytic_profile(shape_of(load_flags("llama3-8b")), H100)


@pytest.mark.parametrize(("layers", "stages"), [(32, 8), (40, 16), (7, 3), (5, 5), (1, 1), (9, 1)])
def test_layers_are_spread_to_the_last_one(layers: int, stages: int):
    for spread in (even_layers(layers, stages), balanced_layers(LLAMA, layers, stages)):
        assert (sum(spread), len(spread)) == (layers, stages)
    assert max(even_layers(layers, stages)) - min(even_layers(layers, stages)) <= 1


def test_the_longer_the_sequences_the_more_layers_the_last_stage_has():
    """Attention makes layers take longer, the vocabulary's work stays."""
    last = [balanced_layers(LLAMA, 32, 8, [Lengths((tokens,))])[-1] for tokens in (1, 1 << 15, 1 << 17, 1 << 20)]
    assert last == sorted(last)
    assert last[0] == balanced_layers(LLAMA, 32, 8)[-1] < last[-1] == 4


def test_layers_are_balanced_for_what_chunks_run_of_sequences_that_begin_alike():
    tree = Lengths((48_000,) * 64, borrowed=(NOTHING_BORROWED, *(Borrowed(0, 47_000),) * 63))
    chunks = [Chunk((Segment(q, start, end),)) for q, (start, end) in enumerate(own_parts(tree))]
    layers, (_, asked) = balanced_layers(LLAMA, 32, 8, [tree]), spreads(LLAMA.costs(even_layers(32, 8)), chunks)
    assert layers == asked.layers
    assert layers != balanced_layers(LLAMA, 32, 8, [Lengths(tree.lengths)])


def test_more_stages_than_layers_are_refused():
    with pytest.raises(EppError, match="4 layers do not make 5 stages"):
        even_layers(4, 5)


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
