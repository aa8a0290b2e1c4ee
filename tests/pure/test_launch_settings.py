"""A run's YAML settings and their errors, the command that they become, what is saved next to it, and its variables."""

import argparse
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

import megatron_epp
from megatron_epp.launch.run_folder import LOCK, hold
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.plan import EppError
from megatron_epp.tools.cli.train import command_of, exports, save_run, variables_of
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


NAMES = ["../../x", "..", ".hidden", "-rf", "a/b", "a\\b", "", "a\nb", "/tmp"]
"""No folders in `runs`."""
VARIABLES = ["X=1; touch PWNED; export Y", "2ND", "A B", "A\nB", "", "Ä", "A-B"]
"""No names that a shell takes for those of variables."""
VALUE = "launch.environment.A_KEY must be text without a NUL character, or a number"
HOSTILE = "'; touch PWNED; '$(touch PWNED)`touch PWNED`\n touch PWNED\n\"\\}"
SECRETS = ("HF_TOKEN", "wandb_api_key", "MY_SECRETS", "PGPASSWORD")
SECRET = 'hunter2-"$x'


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_flags_follow_our_script_or_that_of_the_user(tmp_path):
    ours = command_of(Launch(), ["--num-layers", "4"], 2)
    assert ours[-4:] == ["-m", "megatron_epp.mcore.pretrain_gpt", "--num-layers", "4"]
    assert option(ours, "--nproc-per-node") == "2"
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    assert command_of(Launch(script=str(script)), ["--epp"], 1)[-4:] == ["-m", "megatron_epp.run", str(script), "--epp"]


def test_a_single_node_starts_by_itself_and_several_at_the_first_one():
    single = command_of(Launch(), [], 1)
    assert "--standalone" in single
    assert "--rdzv-endpoint" not in single
    launches = [Launch(nodes=2, node_rank=rank, master_addr="a", master_port=5, wait_seconds=7) for rank in (0, 1)]
    first, other = (command_of(launch, [], 1) for launch in launches)
    for command, is_host in ((first, 1), (other, 0)):
        assert "--standalone" not in command
        assert (option(command, "--rdzv-backend"), option(command, "--rdzv-endpoint")) == ("c10d", "a:5")
        assert option(command, "--rdzv-conf") == f"is_host={is_host},join_timeout=7,read_timeout=7"


def test_settings_and_logs_are_where_the_run_saves_and_every_node_has_its_log():
    assert Settings(launch=Launch(name="a")).folder == Settings(megatron={"save": os.path.join("runs", "a")}).folder
    assert str(Settings(megatron={"save": "there"}, launch=Launch(folder="here")).folder) == "here"
    assert str(Settings(megatron={"save": "a"}).log) == "a/train.log"
    assert str(Settings(megatron={"save": "a"}, launch=Launch(nodes=2, node_rank=1)).log) == "a/train-1.log"
    assert Settings(launch=Launch(full_log=True)).log is None


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"nodes": 2, "node_rank": 2}, "node_rank is 2; it must be from 0 to 1 for launch.nodes 2"),
        ({"nodes": 0}, "launch.nodes is 0; it must be 1 or more"),
        ({"processes_per_node": 0}, "launch.processes_per_node is 0; it must be 1 or more"),
        ({"wait_seconds": 0}, "launch.wait_seconds is 0; it must be 1 or more"),
        ({"master_port": 70000}, "launch.master_port is 70000; it must be from 1 to 65535"),
        ({"torchrun": '"a'}, "launch.torchrun is '\"a'; its quotes must be closed"),
        ({"torchrun": "a\0b"}, "launch.torchrun is 'a\\x00b'; it must be text without control characters"),
        ({"script": "nowhere.py"}, "launch.script is 'nowhere.py'; it must be an existing file"),
        ({"master_addr": "--standalone"}, "launch.master_addr is '--standalone'; it must be the name or the address"),
        *(({"name": name}, f"launch.name is {name!r}; it must") for name in NAMES),
        *(({"environment": {name: 1}}, f"launch.environment: {name!r} is not a name") for name in VARIABLES),
        *(({"environment": {"A_KEY": value}}, VALUE) for value in ["a\0b", ["a"], {"a": 1}]),
    ],
)
def test_mistakes_are_named_in_one_line(launch, words):
    said = refusal(Launch, **launch)
    assert words in said
    assert words != VALUE or said == VALUE, "what may be a secret is not told"


@pytest.fixture(autouse=True)
def _source(monkeypatch):
    for name, value in (("SOURCE", SECRET), ("DIGITS", "0123_4"), ("HOSTILE", HOSTILE)):
        monkeypatch.setenv(f"EPP_TEST_{name}", value)
    for name in ("EPP_TEST_UNSET", "EPP_TEST_API_KEY", "EPP_TEST_A"):
        monkeypatch.delenv(name, raising=False)


def loaded(tmp_path, values, *overrides):
    """Settings of a file that includes another, and overrides, saved in a folder ``run``."""
    under = {"launch": {"environment": values, "folder": str(tmp_path / "run")}, "megatron": {"save": "runs/a"}}
    (tmp_path / "under.yaml").write_text(yaml.safe_dump(under))
    (tmp_path / "over.yaml").write_text("include: under.yaml\nlaunch: {environment: {EPP_TEST_PLAIN: 1}}")
    return load_settings([tmp_path / "over.yaml"], overrides)


def run_saved(settings, *drop):
    command = ["env", *[word for name in drop for word in ("-u", name)], "bash", "command.sh"]
    return subprocess.run(command, cwd=settings.folder, capture_output=True, text=True, check=False)


def test_the_saved_command_runs_again_as_it_is_and_no_value_is_code(tmp_path):
    values = {"A": HOSTILE, "B": "<${oc.env:EPP_TEST_HOSTILE}>", "C": "${oc.env:EPP_TEST_UNSET,'$(touch PWNED)'}"}
    show = "import os, sys; print([os.environ[f'EPP_TEST_{name}'] for name in 'ABC'] + sys.argv[1:])"
    settings = loaded(tmp_path, {f"EPP_TEST_{name}": value for name, value in values.items()})
    save_run(settings, [sys.executable, "-c", show, HOSTILE])
    assert run_saved(settings).stdout == f"{[HOSTILE, f'<{HOSTILE}>', '$(touch PWNED)', HOSTILE]}\n"
    assert not (settings.folder / "PWNED").exists()
    assert load_settings([settings.folder / "settings.yaml"]) == settings
    assert json.loads((settings.folder / "versions.json").read_text())["megatron-epp"] == megatron_epp.__version__


def test_a_secret_is_saved_for_its_owner_alone(tmp_path):
    before = os.umask(0o022)
    for name, mode in (("OMP_NUM_THREADS", 0o644), ("TOKENIZERS_PARALLELISM", 0o644), *((name, 0o600) for name in SECRETS)):
        save_run(loaded(tmp_path, {name: "abc"}), ["true"])
        for path in (tmp_path / "run" / "command.sh", tmp_path / "run" / "settings.yaml"):
            assert path.stat().st_mode & 0o777 == mode
            path.chmod(0o644)
    os.umask(before)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["command.sh", "settings.yaml", "versions.json"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "run" / "command.sh").mkdir(parents=True)
    with pytest.raises(EppError, match=r"command\.sh.* cannot be written .*set launch\.folder"):
        save_run(loaded(tmp_path, {}), ["true"])
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=r"/file/run cannot be written \(Not a directory\)"):
        save_run(loaded(tmp_path, {}, f"launch.folder={tmp_path}/file/run"), ["true"])


@pytest.mark.parametrize(
    "reference", ["${oc.env:EPP_TEST_SOURCE}", "${ oc.env: EPP_TEST_SOURCE,other}", "${oc.env:EPP_TEST_${megatron.name}}"]
)
def test_a_value_from_the_environment_is_saved_as_where_it_came_from(reference, tmp_path):
    values = {"EPP_TEST_API_KEY": f"Bearer {reference}", "EPP_TEST_SAME": "${.EPP_TEST_API_KEY}"}
    settings = loaded(tmp_path, values, "megatron.name=SOURCE")
    variables = variables_of(settings.launch)
    assert [variables[name] for name in ("EPP_TEST_API_KEY", "EPP_TEST_PLAIN")] == [f"Bearer {SECRET}", "1"]
    save_run(settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY, $EPP_TEST_SAME"'])
    saved = {path.name: path.read_text() for path in settings.folder.iterdir()}
    assert not [name for name, text in saved.items() if "hunter2" in text]
    assert f"Bearer {reference}" in saved["settings.yaml"]
    assert run_saved(settings).stdout == f"Bearer {SECRET}, Bearer {SECRET}\n"
    alone = run_saved(settings, "EPP_TEST_SOURCE")
    assert (alone.returncode != 0, alone.stdout) == (True, "")
    assert "EPP_TEST_SOURCE: is not set, and EPP_TEST_API_KEY takes its value" in alone.stderr
    assert "hunter2" not in "".join(exports(settings, masked=True))


def test_a_variable_that_is_handed_on_must_be_there_again(tmp_path):
    save_run(settings := loaded(tmp_path, {"EPP_TEST_SOURCE": "${oc.env:EPP_TEST_SOURCE}"}), ["true"])
    assert run_saved(settings).returncode == 0
    assert "EPP_TEST_SOURCE: is not set" in run_saved(settings, "EPP_TEST_SOURCE").stderr


def test_a_secret_that_is_given_is_masked_where_it_is_shown_and_runs_where_it_is_saved(tmp_path):
    settings = loaded(tmp_path, {"EPP_TEST_API_KEY": SECRET, "OMP_OTHER": "shown"})
    assert [line.partition("-")[2] for line in exports(settings, masked=True)] == ["'***'}", "1}", "shown}"]
    save_run(settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY"'])
    assert run_saved(settings).stdout == f"{SECRET}\n"


@pytest.mark.parametrize(
    ("values", "overrides", "wanted"),
    [
        *(({"EPP_TEST_A": null}, [], None) for null in (None, "${oc.env:EPP_TEST_UNSET,null}")),
        ({"EPP_TEST_A": "${oc.env:EPP_TEST_DIGITS}"}, [], "0123_4"),  # text as it is, and no number
        ({"EPP_TEST_A": "${oc.env:EPP_TEST_UNSET,'1e3'}"}, [], "1e3"),
        ({"EPP_TEST_A": "${megatron.save}/${oc.env:EPP_TEST_SOURCE}"}, [], f"runs/a/{SECRET}"),
        ({"EPP_TEST_A": 1}, ["launch.environment={EPP_TEST_A: '${oc.env:EPP_TEST_SOURCE}'}"], SECRET),
        ({"EPP_TEST_A": 1}, ["launch.environment.EPP_TEST_A=null"], None),
        ({"EPP_TEST_A": 1}, ["launch.environment=null", "launch.environment.EPP_TEST_PLAIN=1"], None),
        ({"EPP_TEST_SOURCE": "set already", "EPP_TEST_A": 1}, [], "1"),
    ],
)
def test_values_are_texts_of_the_environment_and_other_settings_and_null_leaves_one_out(values, overrides, wanted, tmp_path):
    settings = loaded(tmp_path, values, *overrides)
    variables = variables_of(settings.launch)
    assert [variables.get(name) for name in ("EPP_TEST_A", "EPP_TEST_PLAIN", "EPP_TEST_SOURCE")] == [wanted, "1", SECRET]
    save_run(settings, [sys.executable, "-c", "import os; print(os.environ.get('EPP_TEST_A'))"])
    assert run_saved(settings).stdout == f"{wanted}\n"
