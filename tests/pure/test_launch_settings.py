"""YAML settings: includes, environment, overrides and errors that say what to do; and the flags that they become."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.plan import EppError


@pytest.fixture
def write(tmp_path: Path, monkeypatch):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    monkeypatch.setenv("EPP_TEST_NODES", "4")
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    return write_file


REFERRING = """
launch: {nodes: "${oc.env:EPP_TEST_NODES,1}", name: "run-${.nodes}", script: "${oc.env:EPP_TEST_UNSET,null}"}
megatron: {save: "${oc.env:EPP_TEST_UNSET,runs/b}/a", seed: "${oc.decode:${oc.env:EPP_TEST_NODES}}"}
"""
SET = "megatron: {save: runs, lr: 1}\nlaunch: {nodes: 2, script: nowhere.py}\nepp:\n"


@pytest.mark.parametrize(
    ("files", "overrides", "wanted"),
    [
        (
            ["megatron: {num_layers: 4, lr: 1.0e-3}\nepp: {slices: 2}", "megatron: {num_layers: 8}"],
            ["lr=5e-4", "epp.placement=v", "megatron.seed=7"],
            Settings(megatron={"num_layers": 8, "lr": "5e-4", "seed": 7}, epp={"slices": 2, "placement": "v"}),
        ),
        (
            ["include: [parts/model.yaml]\nmegatron: {lr: 2}"],
            ["cluster=this-machine"],
            Settings(cluster="this-machine", megatron={"hidden_size": 64, "num_layers": 3, "lr": 2}),
        ),
        ([SET], ["save=null", "launch.nodes=null", "launch.script=null"], Settings(megatron={"save": None, "lr": 1})),
        ([REFERRING], [], Settings(megatron={"save": "runs/b/a", "seed": 4}, launch=Launch(nodes=4, name="run-4"))),
    ],
    ids=["files and overrides", "includes", "null unsets", "references"],
)
def test_later_settings_win(write, files, overrides, wanted):
    write("parts/model.yaml", "include: sizes.yaml\nmegatron: {hidden_size: 64}")
    write("parts/sizes.yaml", "megatron: {hidden_size: 1, num_layers: 3, lr: 1}")
    paths = [write(f"{number}.yaml", text) for number, text in enumerate(files)]
    assert replace(load_settings(paths, overrides), text="") == wanted


@pytest.mark.parametrize(
    ("text", "overrides", "facts"),
    [
        ("just text", [], ["holds no `name: value` pairs"]),
        ("megatron: 3", [], ["top.yaml: megatron: Cannot assign int to Dict"]),
        ("launch: {environment: [3]}", [], ["top.yaml: ", "Cannot merge"]),
        (
            "megatrom: {lr: 1}",
            [],
            ["top.yaml: megatrom: unknown; did you mean 'megatron'?; there are cluster, megatron, epp, launch, include"],
        ),
        (
            "launch: {master_adr: a}",
            [],
            ["top.yaml: launch.master_adr: unknown; did you mean 'master_addr'?; there are nodes, "],
        ),
        ("epp: {}", ["launch.nodes=two"], ["override 'launch.nodes=two': launch.nodes: Value 'two' of type 'str'"]),
        ("launch: {nodes: 0}", [], ["top.yaml: launch.nodes is 0"]),
        ("epp: {}", ["lr"], ["key=value"]),
        ("include: [nothere.yaml]", [], ["no file nothere.yaml, which", "recipes/tiny-cpu"]),
        ("include: circle.yaml", [], ["in a circle", "circle.yaml", "top.yaml"]),
        ("megatron: {save: '${oc.env:EPP_TEST_UNSET}'}", [], ["top.yaml: megatron.save: ", "'EPP_TEST_UNSET' not found"]),
        *(
            (f"megatron: {{save: '{old}'}}", [], ["megatron.save: ", "variable of the environment is ${oc.env:NAME,default}"])
            for old in ("${EPP_TEST_UNSET}", "${EPP_TEST_UNSET:runs}")
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_with_what_would_do(write, text, overrides, facts):
    write("circle.yaml", "include: top.yaml")
    top = write("top.yaml", text)
    with pytest.raises(EppError) as error:
        load_settings([top], overrides)
    message = str(error.value)
    assert [fact for fact in facts if fact not in message] == []
    assert len(message.splitlines()) <= 2


# ---- settings as flags of the training script ------------------------------------------------------------------------


PARSER = argparse.ArgumentParser()
PARSER.add_argument("--num-layers")
PARSER.add_argument("--fast-path", action=argparse.BooleanOptionalAction)
PARSER.add_argument("--data-path", nargs="+")
PARSER.add_argument("--betas", nargs=2)
PARSER.add_argument("--epp-offload", choices=("on", "off"))
PARSER.add_argument("--epp-slices")
for switch in ("--swiglu", "--epp", "--epp-split-weight-gradient"):
    PARSER.add_argument(switch, action="store_true")


OURS = {"slices": 2, "split_weight_gradient": True}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ""),
        ({"megatron": {"num_layers": 4, "swiglu": True, "fast_path": False}}, "--num-layers 4 --swiglu --no-fast-path"),
        ({"megatron": {"data_path": ["a", "b"]}}, "--data-path a b"),
        ({"megatron": {"num_layers": None, "swiglu": False, "data_path": "a"}}, "--data-path a"),
        ({"epp": {}}, "--epp"),
        ({"epp": OURS}, "--epp --epp-slices 2 --epp-split-weight-gradient"),
        ({"epp": OURS | {"enabled": False}}, ""),
        # words that YAML reads as true and false
        ({"epp": {"offload": True}}, "--epp --epp-offload on"),
        ({"epp": {"offload": "on"}}, "--epp --epp-offload on"),
        ({"epp": {"offload": False}}, "--epp --epp-offload off"),
        # values that look like flags
        ({"megatron": {"num_layers": "--swiglu"}}, "--num-layers=--swiglu"),
        ({"megatron": {"num_layers": -1}}, "--num-layers=-1"),
        ({"megatron": {"data_path": [-1, "-.5", "a"]}}, "--data-path -1 -.5 a"),
    ],
)
def test_settings_are_flags(settings, flags):
    assert argv_of(Settings(**settings), PARSER) == flags.split()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"megatron": {"num_layer": 4}}, "megatron.num_layer is not a flag of the training script; did you mean 'num_layers'?"),
        ({"megatron": {"lora_rank": 8}}, "script; Megatron has none for adapters, which docs/adapters.md trains"),
        ({"epp": {"slice": 2}}, "did you mean 'slices'?"),
        ({"megatron": {"swiglu": 1}}, "is a switch: give true or false"),
        ({"megatron": {"num_layers": [1, 2]}}, "takes one value"),
        ({"megatron": {"num_layers": True}}, "takes one value"),
        ({"megatron": {"data_path": {"a": 1}}}, "or a list of them"),
        ({"megatron": {"data_path": ["a", "--swiglu"]}}, "one among several does not begin with -"),
        ({"megatron": {"num_layers": "4\0"}}, "a value has no NUL character"),
    ],
)
def test_a_key_or_a_value_that_is_none_of_its_flag_is_refused(settings, words):
    with pytest.raises(EppError) as error:
        argv_of(Settings(**settings), PARSER)
    assert words in str(error.value)
