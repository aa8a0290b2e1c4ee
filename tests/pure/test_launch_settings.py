"""YAML settings: includes, environment, overrides and errors that say what to do; and the flags that they become."""

import argparse
from pathlib import Path

import pytest

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.plan import EppError


@pytest.fixture
def write(tmp_path: Path):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_later_files_win_over_earlier_ones_and_overrides_over_all(write):
    one = write("one.yaml", "megatron: {num_layers: 4, lr: 1.0e-3}\nepp: {slices: 2}")
    two = write("two.yaml", "megatron: {num_layers: 8}")
    settings = load_settings([one, two], ["lr=5e-4", "epp.placement=v", "megatron.seed=7"])
    assert settings.megatron["num_layers"] == 8
    assert settings.megatron["seed"] == 7
    assert float(settings.megatron["lr"]) == 5e-4
    assert settings.epp == {"slices": 2, "placement": "v"}


def test_a_file_wins_over_what_it_includes_from_beside_it(write):
    write("parts/model.yaml", "include: [sizes.yaml]\nmegatron: {hidden_size: 64}")
    write("parts/sizes.yaml", "megatron: {hidden_size: 1, num_layers: 3, lr: 1}")
    top = write("top.yaml", "include: [parts/model.yaml]\nmegatron: {lr: 2}")
    assert load_settings([top]).megatron == {"hidden_size": 64, "num_layers": 3, "lr": 2}


def test_null_unsets(write):
    top = write("top.yaml", "megatron: {save: runs, lr: 1}\nlaunch: {nodes: 2, script: nowhere.py}\nepp:\n")
    settings = load_settings([top], ["save=null", "launch.nodes=null", "launch.script=null"])
    assert settings.megatron == {"save": None, "lr": 1}
    assert settings.launch == Launch()
    assert settings.epp is None


def test_variables_come_from_the_environment_with_the_type_of_their_setting(write, monkeypatch):
    monkeypatch.setenv("EPP_TEST_NODES", "4")
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    top = write(
        "top.yaml",
        "launch: {nodes: '${oc.env:EPP_TEST_NODES,1}', name: 'run-${.nodes}', script: '${oc.env:EPP_TEST_UNSET,null}'}\n"
        "megatron: {save: '${oc.env:EPP_TEST_UNSET,runs/b}/a', seed: '${oc.decode:${oc.env:EPP_TEST_NODES}}'}",
    )
    settings = load_settings([top])
    assert settings.launch == Launch(nodes=4, name="run-4")
    assert settings.megatron == {"save": "runs/b/a", "seed": 4}


@pytest.mark.parametrize(
    ("text", "overrides", "facts"),
    [
        ("just text", [], ["holds no `name: value` pairs"]),
        ("megatron: 3", [], ["top.yaml: megatron: Cannot assign int to Dict"]),
        ("launch: 3", [], ["top.yaml: ", "int is not a subclass of Launch"]),
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
def test_what_cannot_be_is_refused_by_name_with_what_would_do(write, monkeypatch, text, overrides, facts):
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
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
        ({"epp": {"enabled": "maybe"}}, "epp.enabled is 'maybe'; --epp is a switch: give true or false"),
        ({"megatron": {"data_path": ["a", "--swiglu"]}}, "must not begin with -"),
        ({"megatron": {"num_layers": "4\0"}}, "no command line can hold a NUL character"),
    ],
)
def test_a_key_or_a_value_that_is_none_of_its_flag_is_refused(settings, words):
    with pytest.raises(EppError) as error:
        argv_of(Settings(**settings), PARSER)
    assert words in str(error.value)
