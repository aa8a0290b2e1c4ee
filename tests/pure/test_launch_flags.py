"""Settings as flags of the training script."""

import argparse

import pytest

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import SettingsError

PARSER = argparse.ArgumentParser()
PARSER.add_argument("--num-layers")
PARSER.add_argument("--fast-path", action=argparse.BooleanOptionalAction)
PARSER.add_argument("--data-path", nargs="+")
PARSER.add_argument("--betas", nargs=2)
PARSER.add_argument("--epp-offload", choices=("on", "off"))
PARSER.add_argument("--epp-slices")
for switch in ("--swiglu", "--epp", "--epp-split-weight-gradient"):
    PARSER.add_argument(switch, action="store_true")


def refused(**settings: object) -> str:
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
        refused(megatron={"num_layer": 4})
        == "megatron.num_layer is not a flag of the training script; did you mean 'num_layers'?"
    )
    assert "did you mean 'slices'?" in refused(epp={"slice": 2})


def test_a_value_that_does_not_go_with_its_flag_is_refused():
    assert "is a switch: give true or false" in refused(megatron={"swiglu": 1})
    assert "takes one value" in refused(megatron={"num_layers": [1, 2]})
    assert "takes one value" in refused(megatron={"num_layers": True})
    assert "or a list of them" in refused(megatron={"data_path": {"a": 1}})
    assert "takes 2 values" in refused(megatron={"betas": [0.9]})


def test_a_value_is_not_read_as_a_flag():
    assert argv_of({"megatron": {"num_layers": "--swiglu"}}, PARSER) == ["--num-layers=--swiglu"]
    assert argv_of({"megatron": {"num_layers": -1}}, PARSER) == ["--num-layers=-1"]
    assert argv_of({"megatron": {"data_path": [-1, "-.5", "a"]}}, PARSER) == ["--data-path", "-1", "-.5", "a"]
    assert "must not begin with -" in refused(megatron={"data_path": ["a", "--swiglu"]})
    assert "no command line can hold a NUL character" in refused(megatron={"num_layers": "4\0"})
