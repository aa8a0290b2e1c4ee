"""Files of costs: version 1 is read as the blocks that it describes, learnt costs come back, and what is wrong is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost import CPU, LinearTime, ModeCosts, ModelShape, PipelineCosts, StageCosts, Static, analytic_costs
from megatron_epp.cost.blocks import ATTENTION, HEAD, INPUT, LAYER, BlockCosts
from megatron_epp.cost.kept import FILE_NAME, KeptCosts, from_state, to_state
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.learning import of_whole_microbatches
from megatron_epp.cost.library import load_costs
from megatron_epp.plan import EppError

GOLDEN = Path(__file__).parent.parent / "golden"
BY_HAND = {
    "num_layers": 2,
    "half": {"kind": "attention", "forward": {"fixed_us": 5.0}, "backward": {"fixed_us": 6.0}, "bytes_per_token": 60.0},
    "forward": {"fixed_us": 9.0, "per_token_us": 1.0},
    "backward": {"fixed_us": 19.0, "per_token_us": 2.0},
    "extra_forward": {"per_token_us": 3.0},
    "recompute": {"mlp": {"again": {"per_token_us": 0.5}, "bytes_per_token": 70.0}},
    "layer_bytes_per_token": 100.0,
    "recomputed_layer_bytes_per_token": 8.0,
    "extra_bytes_per_token": 11.0,
    "head_bytes_per_token": 3.0,
    "kv_bytes_per_token": 16.0,
    "kv_heads": 2,
    "extra_weight_bytes_per_token": 4.0,
    "static": {"weights": 1000},
    "workspace_bytes": 77,
}


def by_hand(**changes: Any) -> str:
    """Return a file of one stage; a change to None leaves a field out."""
    stage = {name: value for name, value in (BY_HAND | changes).items() if value is not None}
    body = {"schema": "megatron-epp/costs", "version": 1, "name": "by hand", "hidden_bytes_per_token": 4.0, "stages": [stage]}
    return json.dumps(body)


def test_a_file_of_version_1_gives_the_costs_that_one_of_version_2_has():
    """Of two stages of a model, the first of which ends inside a layer, with the vocabulary in shards."""
    older, newer = (PipelineCosts.from_json((GOLDEN / f"costs_version_{version}.json").read_text()) for version in (1, 2))
    assert older == newer
    assert older.vocabulary is not None
    assert [len(stage.inner) for stage in older.stages] == [1, 1]


def test_each_field_becomes_one_of_a_block():
    costs = PipelineCosts.from_json(by_hand())
    kv = KVBytes(16.0, heads=2)
    received = BlockCosts(kind=INPUT, bytes_per_token=8.0)
    layers = BlockCosts(
        kind=LAYER,
        count=2,
        forward=LinearTime(9.0, 1.0),
        backward=LinearTime(19.0, 2.0),
        recompute={"mlp": ModeCosts(LinearTime(0.0, 0.5), 70.0)},
        bytes_per_token=100.0,
        input_bytes_per_token=8.0,
        kv=kv,
    )
    half = BlockCosts(
        kind=ATTENTION,
        forward=LinearTime(5.0),
        backward=LinearTime(6.0),
        bytes_per_token=60.0,
        input_bytes_per_token=8.0,
        kv=kv,
    )
    head = BlockCosts(
        kind=HEAD, forward=LinearTime(0.0, 3.0), bytes_per_token=3.0, weight_bytes_per_token=4.0, workspace_bytes=77
    )
    assert costs.stages == (StageCosts((received, layers, half, head), Static(weights=1000)),)
    assert '"version": 2' in costs.to_json()
    assert PipelineCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_layers": None}, r"stages\[0\].num_layers is missing"),
        ({"kv_bytes_per_token": None}, r"stages\[0\].kv_bytes_per_token is missing"),
        ({"layer_flops": 5}, r"stages\[0\].layer_flops is unknown"),
        ({"half": 5}, r"stages\[0\].half is 5"),
        ({"half": {"kind": "norm"}}, r"kind is 'norm'"),
        ({"head_bytes_per_token": "much"}, r"stages\[0\].head_bytes_per_token: 'much' is not a number"),
        ({"forward": 7}, r"forward is 7"),
        ({"weight": {"fixed_us": 99.0}}, r"weight is above the backward"),
    ],
)
def test_a_wrong_file_of_version_1_is_refused(changes: dict[str, Any], error: str):
    with pytest.raises(EppError, match=error):
        PipelineCosts.from_json(by_hand(**changes))


def test_files_of_other_versions_are_refused():
    for version in (0, 3):
        with pytest.raises(EppError, match=f"version {version}, where this reads 'megatron-epp/costs' 2"):
            PipelineCosts.from_json(by_hand().replace('"version": 1', f'"version": {version}'))


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
BAD: dict[str, tuple[Any, str]] = {
    "no dictionary": ([1], "not a dictionary"),
    "another schema": ({**STATE, "schema": "x"}, "schema 'x' version 1"),
    "a later version": ({**STATE, "version": 2}, "version 2"),
    "no list": ({**STATE, "pipelines": 3}, "pipelines is 3, which is not a list"),
    "no fingerprint": (
        {**STATE, "pipelines": [{"costs": STATE["pipelines"][0]["costs"]}]},
        r"pipelines\[0\].learnt_with is missing",
    ),
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
def test_learnt_costs_that_are_not_those_of_one_training_on_documents_are_refused(
    tmp_path: Path, kept: list[KeptCosts], reason: str
) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(to_state(kept)))
    with pytest.raises(EppError, match=f"{FILE_NAME}.*{reason}"):
        load_costs(str(path))
