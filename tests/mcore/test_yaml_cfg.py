"""Megatron's --yaml-cfg next to --epp: a file in Megatron's own layout means what the same flags mean, and trains."""

import dataclasses
import logging
import re
import sys

import pytest
import yaml
from megatron.core.transformer import TransformerConfig

from megatron_epp.mcore import entry
from megatron_epp.mcore.arguments.yaml_cfg import take_yaml
from megatron_epp.mcore.patches import install
from tests.support.mcore.forked import launch
from tests.support.mcore.launch import TINY
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

FIELDS = {field.name for field in dataclasses.fields(TransformerConfig)}
MODEL = [flag for flag in TINY if flag != "--mock-data"]


@pytest.fixture
def parser():
    return entry.megatron_parser()


@pytest.fixture
def write(tmp_path):
    def write_file(settings):
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        return str(tmp_path / "settings.yaml")

    return write_file


def in_megatrons_layout(args, usual):
    """Return the unusual settings as a file has them: fields of the model's config in a section of their own."""
    settings = {key: value for key, value in vars(args).items() if value != getattr(usual, key)}
    model = {key: settings.pop(key) for key in list(settings) if key in FIELDS}
    return settings | {"language_model": model}


def test_a_file_means_what_its_flags_mean_and_flags_beside_it_win(parser, write):
    usual, parsed = parser.parse_args([]), parser.parse_args([*map(str, MODEL), "--epp-slices", "3", "--data-path", "a", "b"])
    path = write(in_megatrons_layout(parsed, usual))
    read = entry.check(parser, ["--epp", "--yaml-cfg", path, "--lr", "0.5"])
    assert vars(read) == vars(parsed) | {"epp": True, "lr": 0.5, "epp_yaml_cfg": path}
    assert read.epp_lookahead == usual.epp_lookahead


def test_fields_of_the_models_config_are_the_flags_they_stand_for(parser, write, monkeypatch):
    model = {
        "activation_func": "swiglu", "gated_linear_unit": True, "add_bias_linear": False, "num_moe_experts": 8,
        "num_query_groups": 2, "layernorm_epsilon": "1e-6", "init_method": "xavier_uniform", "persist_layer_norm": False,
    }  # fmt: skip
    monkeypatch.setenv("EPP_TEST_FOLDER", "runs/a")
    more = {"group_query_attention": False, "save": "${EPP_TEST_FOLDER}/b"}
    args = entry.check(parser, ["--epp", "--yaml-cfg", write({"language_model": model} | more)])
    assert args.save == "runs/a/b"
    assert (args.swiglu, args.add_bias_linear, args.num_experts, args.no_persist_layer_norm) == (True, False, 8, True)
    assert (args.num_query_groups, args.group_query_attention) == (2, True)
    assert args.layernorm_epsilon == 1e-6
    assert args.init_method_xavier_uniform


def test_keys_that_do_nothing_are_named_and_those_that_ask_for_nothing_are_not(parser, write, caplog):
    usual = {"perform_initialization": TransformerConfig.perform_initialization, "grad_sync_func": None}
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        take_yaml(parser, ["--epp", "--yaml-cfg", write({"clip_gard": 1.0, "model_parallel": usual})])
    assert "do nothing: clip_gard (did you mean 'clip_grad'?)" in caplog.text
    assert "perform_initialization" not in caplog.text


@pytest.mark.parametrize(("more", "is_ours"), [(["--epp"], True), ([], False)])
def test_megatron_reads_the_file_itself_where_plans_are_not_asked_for(parser, write, monkeypatch, more, is_ours):
    path = write({"extra": 5})
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--yaml-cfg", path, *more])

    def extra(parser):
        parser.add_argument("--extra", type=int)
        return parser

    args = install._read_yaml(lambda provider: provider(parser).parse_args(), extra)
    assert (args.extra, args.yaml_cfg) == ((5, None) if is_ours else (None, path))


def test_it_trains_with_plans(parser, write, tmp_path):
    prefix = write_pair(tmp_path / "text", documents_of(long_tailed_lengths(64, longest=33), vocab_size=127))
    ours = ["--micro-batch-size", 1, "--data-path", prefix, "--split", "100,0,0", "--eval-iters", 0, "--train-iters", 2]
    path = write(in_megatrons_layout(parser.parse_args([*map(str, (*MODEL, *ours))]), parser.parse_args([])))
    finished = launch(1, "-m", "megatron_epp.mcore.pretrain_gpt", "--yaml-cfg", path, "--epp")
    assert re.findall(r"^epp iteration (\d) ", finished.output, re.MULTILINE) == ["1", "2"], finished.output[-5000:]
