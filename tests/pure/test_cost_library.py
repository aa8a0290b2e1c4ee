"""Models and clusters as YAML: the shipped files, and what is wrong with others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_epp.cost import CPU, H100, Profile, analytic_profile, causal_pairs
from megatron_epp.cost.library import (
    balanced_layers,
    even_layers,
    find,
    load_cluster,
    load_costs,
    load_flags,
    shape_of,
    shipped,
)
from megatron_epp.plan import EppError


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
    assert cluster.rates.linear_flops == 5e9
    assert cluster.rates.message_bytes == CPU.message_bytes
    assert cluster.device_memory_gb == 3
    assert load_cluster("h100x8").rates.linear_flops == H100.linear_flops


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rates: abacus", "abacus.*h100, cpu"),
        ("flops: 3", "unknown flops"),
        ("linear_flops: fast", "linear_flops is 'fast'"),
        ("linear_flops: -1", "must be a number from 1"),
        ("- a list", "holds no `name: value` pairs"),
        ("a: [", "not YAML"),
    ],
)
def test_a_cluster_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(EppError, match=message):
        load_cluster(str(path))


def test_a_model_that_lacks_something_is_refused(tmp_path: Path):
    with pytest.raises(EppError, match="hidden_size, a whole number"):
        shape_of({"num_layers": 2})
    path = tmp_path / "model.yaml"
    path.write_text("hidden_size: 3")
    with pytest.raises(EppError, match="no `megatron:`"):
        load_flags(str(path))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(EppError, match=r"no file gpt5.*llama3-8b"):
        find("models", "gpt5")


def test_without_yaml_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(EppError, match="pip install pyyaml"):
        load_flags("llama3-8b")


@pytest.mark.parametrize(("layers", "stages"), [(32, 8), (40, 16), (7, 3), (5, 5), (1, 1), (9, 1)])
def test_layers_are_spread_to_the_last_one(layers: int, stages: int):
    profile = analytic_profile(shape_of(load_flags("llama3-8b")), H100)
    for spread in (even_layers(layers, stages), balanced_layers(profile, layers, stages)):
        assert sum(spread) == layers
        assert len(spread) == stages
    assert max(even_layers(layers, stages)) - min(even_layers(layers, stages)) <= 1


def test_the_longer_the_sequences_the_more_layers_the_last_stage_has():
    """Attention makes layers take longer, the vocabulary's work stays."""
    profile = analytic_profile(shape_of(load_flags("llama3-8b")), H100)
    last = [balanced_layers(profile, 32, 8, (tokens,))[-1] for tokens in (1, 1 << 15, 1 << 17, 1 << 20)]
    assert last == sorted(last)
    assert last[0] == balanced_layers(profile, 32, 8)[-1] < last[-1] == 4


def test_layers_are_balanced_for_the_time_of_all_sequences():
    profile, lengths = analytic_profile(shape_of(load_flags("llama3-8b")), H100), (200_000, 90_000, 3000, 500, 500)

    def slowest_us(layers: tuple[int, ...]) -> float:
        lines = [stage.line("forward") + stage.line("backward") for stage in profile.costs(layers).stages]
        return max(line.time_us(sum(lengths), sum(causal_pairs(0, length) for length in lengths)) for line in lines)

    best = min(slowest_us((*even_layers(32 - last, 7), last)) for last in range(26))
    assert slowest_us(balanced_layers(profile, 32, 8, lengths)) <= best


def test_more_stages_than_layers_are_refused():
    with pytest.raises(EppError, match="4 layers do not make 5 stages"):
        even_layers(4, 5)
