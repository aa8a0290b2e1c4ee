"""Settings as flags of the training script."""

import pytest

from megatron_epp.launch.flags import Flag, argv_of
from megatron_epp.launch.settings import SettingsError

FLAGS = {
    "num_layers": Flag("--num-layers", takes_value=True),
    "swiglu": Flag("--swiglu", takes_value=False),
    "fast_path": Flag("--fast-path", takes_value=False, opposite="--no-fast-path"),
    "data_path": Flag("--data-path", takes_value=True, takes_several=True),
    "epp": Flag("--epp", takes_value=False),
    "epp_offload": Flag("--epp-offload", takes_value=True, says_on_or_off=True),
    "epp_slices": Flag("--epp-slices", takes_value=True),
    "epp_split_weight_gradient": Flag("--epp-split-weight-gradient", takes_value=False),
}


def refused(**settings: object) -> str:
    with pytest.raises(SettingsError) as error:
        argv_of(settings, FLAGS)
    return str(error.value)


def test_values_lists_switches_and_null():
    megatron = {"num_layers": 4, "swiglu": True, "fast_path": False, "data_path": ["a", "b"]}
    assert argv_of({"megatron": megatron}, FLAGS) == [
        "--num-layers",
        "4",
        "--swiglu",
        "--no-fast-path",
        "--data-path",
        "a",
        "b",
    ]
    assert argv_of({"megatron": {"num_layers": None, "swiglu": False, "data_path": "a"}}, FLAGS) == ["--data-path", "a"]


def test_on_and_off_are_words_where_a_flag_takes_them_though_yaml_reads_them_as_true_and_false():
    for value, word in ((True, "on"), ("on", "on"), (False, "off")):
        assert argv_of({"epp": {"offload": value}}, FLAGS) == ["--epp", "--epp-offload", word]


def test_an_epp_section_switches_elastic_plans_on_unless_it_says_otherwise():
    assert argv_of({"epp": {}}, FLAGS) == ["--epp"]
    ours = {"slices": 2, "split_weight_gradient": True}
    assert argv_of({"epp": ours}, FLAGS) == ["--epp", "--epp-slices", "2", "--epp-split-weight-gradient"]
    assert argv_of({"epp": ours | {"enabled": False}}, FLAGS) == []
    assert argv_of({}, FLAGS) == []


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


def test_a_value_is_not_read_as_a_flag():
    assert argv_of({"megatron": {"num_layers": "--swiglu"}}, FLAGS) == ["--num-layers=--swiglu"]
    assert argv_of({"megatron": {"num_layers": -1}}, FLAGS) == ["--num-layers=-1"]
    assert argv_of({"megatron": {"data_path": [-1, "-.5", "a"]}}, FLAGS) == ["--data-path", "-1", "-.5", "a"]
    assert "must not begin with -" in refused(megatron={"data_path": ["a", "--swiglu"]})
    assert "no command line can hold a NUL character" in refused(megatron={"num_layers": "4\0"})
