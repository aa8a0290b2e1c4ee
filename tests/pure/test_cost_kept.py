"""Learnt costs come back as they were from a state, and say how another run differs from theirs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.cost import CPU, ModelShape, analytic_costs
from megatron_epp.cost.kept import FILE_NAME, KeptCosts, from_state, to_state
from megatron_epp.cost.learning import of_whole_microbatches
from megatron_epp.cost.library import load_costs
from megatron_epp.plan import EppError

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
