"""YAML settings, their errors and the flags that they become; short runs that fail say why; the folder that a run holds."""

import argparse
import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_epp.launch.run_folder import LOCK, hold
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.plan import EppError
from megatron_epp.tools.launch import runs
from megatron_epp.tools.launch.runs import reason_in
from tests.support.calls import refusal


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
KEYS = "; there are cluster, megatron, epp, launch, include"
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
        ("megatrom: {lr: 1}", [], ["top.yaml: megatrom: unknown; did you mean 'megatron'?", KEYS]),
        ("launch: {master_adr: a}", [], ["top.yaml: launch.master_adr: unknown; did you mean 'master_addr'?", "are nodes, "]),
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


PARSER = argparse.ArgumentParser()
PARSER.add_argument("--num-layers")
PARSER.add_argument("--fast-path", action=argparse.BooleanOptionalAction)
PARSER.add_argument("--data-path", nargs="+")
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
    assert words in refusal(argv_of, Settings(**settings), PARSER)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("megatron_epp, rank 1: there is no --data-path", "megatron_epp, rank 1: there is no --data-path"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("[rank0]: RuntimeError: boom", "RuntimeError: boom"),
        ("an Error inside of a line", None),
    ],
)
def test_the_reason_is_the_line_that_names_it(line, reason):
    assert reason_in(f"iteration 1/2\n{line}\nlast\n") == reason


def test_ranks_start_under_torchrun_and_figures_are_read(tmp_path, monkeypatch):
    def stand_in(command, log, limit_s, environment):
        assert command[1:4] == ["-m", "megatron_epp.tools.launch.torchrun", "--standalone"]
        assert command[command.index("--nproc-per-node") + 1] == "2"
        assert command[-4:] == ["--num-layers", "4", "--epp-report-dir", str(tmp_path)]
        (tmp_path / "iterations.jsonl").write_text('{"iteration": 1, "tokens": 50, "loss": 2.5}\n')
        with log.open("a") as output:
            output.write(" iteration        1/       1 | elapsed time per iteration (ms): 10.0 |\n")
        return 0

    monkeypatch.setattr(runs, "count_gpus", lambda: 2)
    monkeypatch.setattr(runs, "_exit_code", stand_in)
    run = runs.train(tmp_path, 2, {"epp": True, "num_layers": 4})
    assert (run.losses, run.tokens_per_second) == ([2.5], 5000)


@pytest.mark.parametrize(
    ("script", "limit_s", "code"), [("echo why >&2; exit 3", 60, 3), ("echo why; exec sleep 60", 0.5, None)]
)
def test_what_a_command_says_is_in_the_log_however_it_ends(tmp_path, script, limit_s, code):
    log = tmp_path / "log"
    log.write_text("first\n")
    assert runs._exit_code(["sh", "-c", script], log, limit_s, {}) == code
    assert log.read_text() == "first\nwhy\n"


HOLDER = """
import sys, subprocess
from megatron_epp.launch.run_folder import hold
hold(sys.argv[1], "0123abcd")
subprocess.Popen(["sleep", "600"])  # a helper process that lives on
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_told_of_the_first_until_that_is_killed(tmp_path: Path):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(EppError, match=rf"another run writes into .*: run 0123abcd on .*, process {first.pid}, since 20"):
            hold(folder, "second")
        first.kill()
        first.wait()
        hold(folder, "second")
        hold(folder, "second")
        assert '"run": "second"' in (folder / LOCK).read_text()
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.stdout.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=r"file/run cannot be written \(Not a directory\)"):
        hold(tmp_path / "file" / "run", "run")


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with caplog.at_level(logging.WARNING):
        hold(tmp_path, "run")
    assert "cannot be locked (No locks available)" in caplog.text
