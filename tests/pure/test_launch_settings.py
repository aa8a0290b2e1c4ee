"""YAML settings: includes, environment, overrides and errors that say what to do; and the flags that they become."""

import argparse
from pathlib import Path

import pytest

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import SettingsError, load_settings
from megatron_epp.plan import EppError


@pytest.fixture
def write(tmp_path: Path):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def refused(*arguments: object) -> str:
    with pytest.raises(EppError) as error:
        load_settings(*arguments)  # type: ignore[arg-type]
    message = str(error.value)
    assert len(message.splitlines()) <= 2
    return message


def test_later_files_win_over_earlier_ones_and_overrides_over_all(write):
    one = write("one.yaml", "megatron: {num_layers: 4, lr: 1.0e-3}\nepp: {slices: 2}")
    two = write("two.yaml", "megatron: {num_layers: 8}")
    settings = load_settings([one, two], ["lr=5e-4", "epp.placement=v", "megatron.seed=7"])
    assert settings["megatron"]["num_layers"] == 8
    assert settings["megatron"]["seed"] == 7
    assert float(settings["megatron"]["lr"]) == 5e-4
    assert settings["epp"] == {"slices": 2, "placement": "v"}


def test_a_file_wins_over_what_it_includes_from_beside_it(write):
    write("parts/model.yaml", "include: [sizes.yaml]\nmegatron: {hidden_size: 64}")
    write("parts/sizes.yaml", "megatron: {hidden_size: 1, num_layers: 3, lr: 1}")
    top = write("top.yaml", "include: [parts/model.yaml]\nmegatron: {lr: 2}")
    assert load_settings([top])["megatron"] == {"hidden_size": 64, "num_layers": 3, "lr": 2}


def test_shipped_files_are_found_by_name(write):
    top = write("top.yaml", "include: [models/llama3-8b]")
    assert load_settings([top])["megatron"]["num_layers"] == 32


def test_null_unsets(write):
    top = write("top.yaml", "megatron: {save: runs, lr: 1}")
    assert load_settings([top], ["save=null"])["megatron"] == {"save": None, "lr": 1}


def test_variables_come_from_the_environment_with_the_type_they_read_as(write, monkeypatch):
    monkeypatch.setenv("EPP_TEST_NODES", "4")
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    top = write(
        "top.yaml",
        "launch:\n  nodes: ${EPP_TEST_NODES:1}\n  name: run-${EPP_TEST_NODES}\n  script: ${EPP_TEST_UNSET:null}\n"
        "megatron: {save: '${EPP_TEST_UNSET:runs}/a'}",
    )
    settings = load_settings([top])
    assert settings["launch"] == {"nodes": 4, "name": "run-4", "script": None}
    assert settings["megatron"]["save"] == "runs/a"


def test_a_variable_without_a_value_or_default_is_named(write, monkeypatch):
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    message = refused([write("top.yaml", "megatron: {save: '${EPP_TEST_UNSET}'}")])
    assert "${EPP_TEST_UNSET} is not set: export it" in message


def test_files_that_include_each_other_are_refused_with_the_circle(write):
    a = write("a.yaml", "include: b.yaml")
    write("b.yaml", "include: [a.yaml]")
    message = refused([a])
    assert "in a circle" in message
    assert message.count("a.yaml") == 2
    assert "b.yaml" in message


def test_a_missing_file_is_named_with_who_includes_it_and_what_is_shipped(write):
    top = write("top.yaml", "include: [nothere.yaml]")
    message = refused([top])
    assert "no file nothere.yaml, which" in message
    assert "recipes/tiny-cpu" in message


def test_a_misspelt_section_is_refused_with_the_nearest(write):
    assert "unknown section 'megatrom'; did you mean 'megatron'?" in refused([write("top.yaml", "megatrom: {lr: 1}")])
    assert "unknown section 'eppp'; did you mean 'epp'?" in refused([write("ok.yaml", "epp: {}")], ["eppp.slices=2"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("megatron: [1, 2", "is not YAML"),
        ("just text", "holds no `name: value` pairs"),
        ("megatron: 3", "must hold names with values"),
    ],
)
def test_a_file_that_is_something_else_is_refused(write, text, words):
    assert words in refused([write("top.yaml", text)])


def test_an_override_needs_a_value(write):
    assert "key=value" in refused([write("top.yaml", "epp: {}")], ["lr"])


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


def flags_refused(**settings: object) -> str:
    with pytest.raises(SettingsError) as error:
        argv_of(settings, PARSER)
    return str(error.value)


def test_values_lists_switches_and_null():
    megatron = {"num_layers": 4, "swiglu": True, "fast_path": False, "data_path": ["a", "b"]}
    assert argv_of({"megatron": megatron}, PARSER) == [
        "--num-layers",
        "4",
        "--swiglu",
        "--no-fast-path",
        "--data-path",
        "a",
        "b",
    ]
    assert argv_of({"megatron": {"num_layers": None, "swiglu": False, "data_path": "a"}}, PARSER) == ["--data-path", "a"]


def test_on_and_off_are_words_where_a_flag_takes_them_though_yaml_reads_them_as_true_and_false():
    for value, word in ((True, "on"), ("on", "on"), (False, "off")):
        assert argv_of({"epp": {"offload": value}}, PARSER) == ["--epp", "--epp-offload", word]


def test_an_epp_section_switches_elastic_plans_on_unless_it_says_otherwise():
    assert argv_of({"epp": {}}, PARSER) == ["--epp"]
    ours = {"slices": 2, "split_weight_gradient": True}
    assert argv_of({"epp": ours}, PARSER) == ["--epp", "--epp-slices", "2", "--epp-split-weight-gradient"]
    assert argv_of({"epp": ours | {"enabled": False}}, PARSER) == []
    assert argv_of({}, PARSER) == []


def test_an_unknown_key_is_refused_with_the_nearest():
    assert (
        flags_refused(megatron={"num_layer": 4})
        == "megatron.num_layer is not a flag of the training script; did you mean 'num_layers'?"
    )
    assert "did you mean 'slices'?" in flags_refused(epp={"slice": 2})


def test_a_value_that_does_not_go_with_its_flag_is_refused():
    assert "is a switch: give true or false" in flags_refused(megatron={"swiglu": 1})
    assert "takes one value" in flags_refused(megatron={"num_layers": [1, 2]})
    assert "takes one value" in flags_refused(megatron={"num_layers": True})
    assert "or a list of them" in flags_refused(megatron={"data_path": {"a": 1}})
    assert "takes 2 values" in flags_refused(megatron={"betas": [0.9]})


def test_a_value_is_not_read_as_a_flag():
    assert argv_of({"megatron": {"num_layers": "--swiglu"}}, PARSER) == ["--num-layers=--swiglu"]
    assert argv_of({"megatron": {"num_layers": -1}}, PARSER) == ["--num-layers=-1"]
    assert argv_of({"megatron": {"data_path": [-1, "-.5", "a"]}}, PARSER) == ["--data-path", "-1", "-.5", "a"]
    assert "must not begin with -" in flags_refused(megatron={"data_path": ["a", "--swiglu"]})
    assert "no command line can hold a NUL character" in flags_refused(megatron={"num_layers": "4\0"})
