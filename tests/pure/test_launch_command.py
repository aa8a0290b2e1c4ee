"""The command of a run, what is saved next to it, and the variables that it sets."""

import json
import os
import subprocess
import sys

import pytest
import yaml

import megatron_epp
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.plan import EppError
from megatron_epp.tools.cli.train import command_of, exports, save_run, variables_of
from tests.support.calls import refusal

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
