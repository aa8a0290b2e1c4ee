"""Settings against Megatron's own parser: every shipped recipe parses, and mistakes are told in a line."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import load_settings
from megatron_epp.mcore import entry
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan import EppError
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.tools.advice.advice_text import recipe_text
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.cli.prepare import add_arguments
from megatron_epp.tools.cli.train import checked_argv
from megatron_epp.tools.formulas.library import load_cluster, load_flags
from megatron_epp.tools.launch.torchrun import LOG_VARIABLE

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser():
    return entry.megatron_parser()


def parsed(parser, recipe, *overrides):
    return entry.check(parser, argv_of(load_settings([recipe], overrides), parser))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_with_elastic_plans_on_and_is_shown_on_a_machine_without_its_gpus(parser, recipe, capsys):
    settings, args = load_settings([recipe]), parsed(parser, recipe)
    assert args.epp
    for name in ("num_layers", "seq_length", "pipeline_model_parallel_size", "global_batch_size"):
        assert getattr(args, name) == settings.megatron[name]
    assert args.epp_memory_cap_gb == settings.epp.get("memory_cap_gb")
    assert args.save == args.load, "a run that is started again goes on"
    assert not args.finetune
    capability = torch.cuda.get_device_capability
    assert main(["train", "-c", str(recipe), "--dry-run"]) == 0
    assert " -m megatron_epp.mcore.pretrain_gpt " in capsys.readouterr().out
    assert torch.cuda.get_device_capability is capability


@pytest.mark.parametrize("named_in", ["recipes/llama3-8b-finetune", "data/documents"])
def test_documents_are_prepared_with_the_tokenizer_that_is_trained_with(parser, named_in):
    (command,) = re.findall(r"^# +megatron-epp prepare (.*)$", (CONFIGS / f"{named_in}.yaml").read_text(), re.MULTILINE)
    preparing = argparse.ArgumentParser()
    add_arguments(preparing)
    prepared = preparing.parse_args(shlex.split(command))
    recipe = named_in if named_in.startswith("recipes") else "recipes/llama3-8b-128k"
    args = parsed(parser, recipe)
    assert args.data_path == [prepared.output_prefix]
    assert (args.tokenizer_type, args.tokenizer_model) == (prepared.tokenizer_type, prepared.tokenizer_model)
    assert args.tokenizer_type == "HuggingFaceTokenizer"


def test_bytes_are_no_documents_for_a_recipe_with_a_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("a conversation")
    prepare([tmp_path / "text.txt"], tmp_path / "text")
    settings = load_settings(["recipes/llama3-8b-finetune"], [f"data_path={tmp_path / 'text'}"])
    with pytest.raises(EppError, match=r"tokens of NullTokenizer bytes .* is HuggingFaceTokenizer meta-llama/.* train with --"):
        checked_argv(settings, world_size=8, wants_files=True)
    settings = load_settings(["recipes/tiny-cpu"], [f"data_path={tmp_path / 'text'}"])
    assert str(tmp_path / "text") in checked_argv(settings, world_size=2, wants_files=True)


@pytest.mark.parametrize(
    "config",
    [
        Configuration(2, 2, 4, 1, layers=(9, 9, 8, 6)),
        Configuration(1, 1, 2, 8, virtual=2, placement="v", layers=(8, 8, 8, 8)),
        Configuration(1, 1, 2, 2, virtual=2, placement="v", layers=(9, 8, 8, 7)),
        Configuration(4, 1, 1, 4, layers=(32,)),
    ],
    ids=lambda config: config.name,
)
@pytest.mark.parametrize("model", ["llama3-8b", None], ids=["shipped model", "own model"])
def test_a_recipe_of_advice_parses_and_has_the_layers_of_its_stages(parser, config, model, tmp_path):
    asked = Question(load_flags("llama3-8b"), load_cluster("h100x8"), config.devices, 72 << 30, (300,) * 64, 8192)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(asked, config, model, "300"))
    args = parsed(parser, recipe)
    assert args.epp
    assert args.num_layers == 32
    assert args.padded_vocab_size == 128_256, "rows of the embedding in a checkpoint, and not the tokenizer's with padding"
    assert args.tensor_model_parallel_size == config.tensor
    assert args.sequence_parallel == (config.tensor > 1)
    assert (args.epp_placement or "looped") == config.placement
    if args.pipeline_model_parallel_layout is None:
        assert len(set(config.layers)) == 1
        assert (args.num_virtual_stages_per_pipeline_rank or 1) == config.virtual
    else:
        stages = PipelineParallelLayerLayout.parse_str_to_list(args.pipeline_model_parallel_layout)
        assert tuple(stage.count(LayerType.decoder) for stage in stages) == config.layers


@pytest.mark.parametrize("model", ["llama3-8b", None], ids=["shipped model", "own model"])
def test_a_recipe_for_sequences_that_begin_alike_trains_on_samples_and_says_how_they_share(parser, model, tmp_path):
    borrowed = (NOTHING_BORROWED, *(Borrowed(0, 250),) * 3)
    asked = Question(load_flags("llama3-8b"), load_cluster("h100x8"), 8, 72 << 30, (300,) * 4, 8192, borrowed=borrowed)
    (recipe := tmp_path / "recipe.yaml").write_text(text := recipe_text(asked, Configuration(2, 1, 4, 1), model, "300"))
    args = parsed(parser, recipe)
    assert (args.epp_samples, args.data_path, args.epp_share_prefixes) == (["samples.jsonl"], None, "auto")
    said = " ".join(text.replace("\n# ", " ").split())
    assert "documents without masks share none. A run draws samples one by one" in said


@pytest.mark.parametrize(
    ("model", "tensor", "rows"),
    [
        ({"vocab_size": 50_001}, 1, 50_001),
        ({"vocab_size": 50_001}, 2, None),
        ({"vocab_size": 50_001, "padded_vocab_size": 50_048}, 2, 50_048),
        ({"tokenizer_type": "NullTokenizer"}, 1, None),
    ],
    ids=["as the checkpoint", "indivisible", "given", "own tokenizer"],
)
def test_a_recipe_of_advice_has_the_rows_of_the_checkpoint(model, tensor, rows, tmp_path):
    flags = load_flags("llama3-8b") | model
    asked = Question(flags, load_cluster("h100x8"), tensor, 72 << 30, (300,), 8192)
    text = recipe_text(asked, Configuration(tensor, 1, 1, 1, layers=(32,)), None, "300")
    (recipe := tmp_path / "recipe.yaml").write_text(text)
    assert load_settings([recipe]).megatron.get("padded_vocab_size") == rows


def test_switches_values_and_lists_reach_megatron_as_given(parser):
    args = parsed(parser, "recipes/tiny-cpu", "data_path=[a, b]", "swiglu=false", "epp.trace=[2, 3]", "lr=2e-4")
    assert (args.data_path, args.swiglu, args.epp_trace, args.lr) == (["a", "b"], False, [2, 3], 2e-4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["num_layers=null", "hidden_size=null"], "there is no model, hidden_size, num_layers missing: include one"),
        (["cluster=h900"], "there is no file h900, and there is no such name among the shipped clusters"),
        (["epp.enabled=maybe"], "epp.enabled is 'maybe'; --epp is a switch: give true or false"),
    ],
)
def test_what_every_rank_would_refuse_is_refused_before_anything_starts(overrides, words):
    settings = load_settings(["recipes/tiny-cpu"], overrides)
    with pytest.raises(EppError) as error:
        checked_argv(settings, world_size=2, wants_files=False)
    assert words in str(error.value)


def test_documents_that_are_not_there_are_refused_by_a_run_and_not_by_a_dry_one():
    settings = load_settings(["recipes/tiny-cpu"], ["data_path=nowhere/text"])
    assert "nowhere/text" in checked_argv(settings, world_size=2, wants_files=False)
    with pytest.raises(EppError, match=r"there is no file nowhere/text\.idx"):
        checked_argv(settings, world_size=2, wants_files=True)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [("lrr=1", "did you mean 'lr'?"), ("launch.name=../../x", "launch.name is '../../x'; it must be the name of a folder")],
)
def test_a_users_mistake_is_told_in_the_last_line(mistake, words, capsys):
    assert main(["train", "-c", "recipes/tiny-cpu", "--dry-run", mistake]) == 2
    out, error = capsys.readouterr()
    assert words in error.splitlines()[-1]
    assert "Traceback" not in error
    assert out == ""


def test_a_dry_run_shows_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("EPP_TEST_SOURCE", "hunter2")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    secrets = "launch.environment={HF_TOKEN: hunter3, EPP_TEST_API_KEY: '${oc.env:EPP_TEST_SOURCE}', EPP_TEST_PLAIN: a}"
    assert main(["train", "-c", "recipes/tiny-cpu", "--dry-run", secrets]) == 0
    out, error = capsys.readouterr()
    assert "hunter" not in out + error
    assert {"export HF_TOKEN=${HF_TOKEN-'***'}", "export EPP_TEST_PLAIN=${EPP_TEST_PLAIN-a}"} < set(out.splitlines())
    assert "export EPP_TEST_API_KEY=${EPP_TEST_API_KEY-${EPP_TEST_SOURCE?" in out


def test_a_run_writes_what_it_runs_with_and_becomes_torchrun(tmp_path, monkeypatch, capsys):
    became = []
    monkeypatch.setattr("os.execvpe", lambda *program: became.append(program))
    text = tmp_path / "text.txt"
    text.write_text("a document\n" * 20)
    prepare([text], tmp_path / "text")
    settings = [f"data_path={tmp_path / 'text'}", f"save={tmp_path / 'run'}", "save_interval=5"]
    settings.append("launch.environment={EPP_TEST_PLAIN: a}")
    assert main(["train", "-c", "recipes/tiny-cpu", *settings]) == 0
    ((program, command, environment),) = became
    assert program == command[0]
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert environment["EPP_TEST_PLAIN"] == "a"
    assert environment[LOG_VARIABLE] == str(tmp_path / "run" / "train.log")
    out, error = capsys.readouterr()
    assert shlex.join(command) in out
    assert f"settings, command and versions are in {tmp_path / 'run'}" in error
    assert f"all that Megatron prints is in {tmp_path / 'run' / 'train.log'}; here is the short form" in error
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"command.sh", "settings.yaml", "versions.json"}
    assert main(["train", "-c", "recipes/tiny-cpu", *settings, "launch.full_log=true"]) == 0
    assert LOG_VARIABLE not in became[1][2]
    assert "short form" not in capsys.readouterr().err
