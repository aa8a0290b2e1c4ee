"""Files of models, clusters and costs: those shipped, of earlier versions and of runs, and what is wrong with others."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost.kept import FILE_NAME, KeptCosts, from_state, to_state
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.whole_microbatches import of_whole_microbatches
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import even_layers
from megatron_epp.plan.yaml_files import find, shipped
from megatron_epp.tools.formulas import CPU, H100, ModelShape, Profile, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster, load_costs, load_flags, shape_of
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
    last = [balanced_layers(LLAMA, 32, 8, (tokens,))[-1] for tokens in (1, 1 << 15, 1 << 17, 1 << 20)]
    assert last == sorted(last)
    assert last[0] == balanced_layers(LLAMA, 32, 8)[-1] < last[-1] == 4


def test_more_stages_than_layers_are_refused():
    with pytest.raises(EppError, match="4 layers do not make 5 stages"):
        even_layers(4, 5)
