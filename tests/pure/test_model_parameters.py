"""Parameters counted from flags are those that models are known by."""

from __future__ import annotations

import pytest

from megatron_epp.cli import main
from megatron_epp.cost import H100, ModelShape, analytic_costs
from megatron_epp.cost.blocks import HEAD, PREDICTION
from megatron_epp.cost.library import check_formulas, load_flags, shape_of
from megatron_epp.cost.parameters import kinds_of_layers, parameters_of, summary
from megatron_epp.plan import EppError

BILLIONS = {
    "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "moonlight-16b-a3b": 16.0,
    "glm-4.5-air": 106,
    "gpt-oss-120b": 117,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "mixtral-8x7b": 46.7,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shipped_model_has_the_parameters_that_it_is_known_by(name: str):
    assert parameters_of(load_flags(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize(
    ("frequency", "has"),
    [
        ("([0]*2+[1]*3)", [False, False, True, True, True]),
        ("[0,1]", [False, True, False, True, False]),
        (2, [True, False] * 2 + [True]),
    ],
)
def test_layers_with_experts_are_read_as_megatron_reads_them(frequency, has):
    layers = kinds_of_layers({"num_layers": 5, "num_experts": 4, "moe_layer_freq": frequency})
    assert [mlp == "E" for _, mlp in layers] == has


@pytest.mark.parametrize("frequency", ["import os", "[0]*99999999999", "[0.5]", "(", "[0]*[1]"])
def test_what_is_no_list_of_layers_is_refused(frequency):
    with pytest.raises(EppError, match="is no list of layers"):
        kinds_of_layers({"num_layers": 5, "num_experts": 4, "moe_layer_freq": frequency})


def test_a_model_is_described_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path):
    said = summary(load_flags("deepseek-v3"))
    assert said.startswith("61 layers of 7,168, latent attention, 256 experts in 58, 8 for each token, multi-token prediction")
    assert said.endswith(": 671.0B parameters without it")
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 1000, '
        '"num_attention_heads": 4, "head_dim": 16}'
    )
    assert main.main(["plan", "--model", str(tmp_path), "--lengths", "100,30", "--stages", "2"]) == 0
    assert "4 layers of 64, attention: " in capsys.readouterr().err


def test_kinds_of_layers_multi_token_prediction_are_costs_of_the_last_stage():
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 100, "num_layers": 4}
    bare, ahead = (analytic_costs(ModelShape(**sizes, predictions=depths), H100, [2, 2]) for depths in (0, 2))
    assert ahead.stages[0] == bare.stages[0]
    *_, prediction, head = ahead.stages[1].blocks
    assert (prediction.kind, prediction.count, head.kind) == (PREDICTION, 2, HEAD)
    assert ahead.num_cached_layers == (2, 4)
    assert head.forward.per_token_us == pytest.approx(3 * bare.stages[1].blocks[-1].forward.per_token_us)
    layer = bare.stages[1].layers
    assert prediction.forward.per_pair_us == pytest.approx(2 * layer.forward.per_pair_us)
    assert prediction.bytes_per_token > 2 * layer.bytes_per_token
    more = ahead.stages[1].static_bytes - bare.stages[1].static_bytes
    assert more > 2 * layer.count * 18 * 64 * 64  # its layers, and a copy of the embedding


def test_latents_with_shared_heads_are_refused_and_windows_have_no_formula():
    with pytest.raises(EppError, match="latent attention makes keys and values for every head"):
        shape_of(load_flags("moonlight-16b-a3b") | {"group_query_attention": True, "num_query_groups": 2})
    with pytest.raises(EppError, match="no formula for window_size"):
        check_formulas(load_flags("gpt-oss-120b"))
