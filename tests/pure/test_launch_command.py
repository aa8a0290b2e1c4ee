"""The command of a run, what is saved next to it, and the variables that it sets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron_epp
from megatron_epp.launch.command import Launch, command_of, folder_of, log_of, save_run
from megatron_epp.launch.environment_variables import environment_to_set, exports
from megatron_epp.launch.yaml_settings import SettingsError, load_settings, world_of

NAMES = ["../../x", "..", ".hidden", "-rf", "a/b", "a\\b", "", "a\nb", "/tmp"]
"""No folders in `runs`."""
VARIABLES = ["X=1; touch PWNED; export Y", "2ND", "A B", "A\nB", "", "Ä", "A-B", 1]
"""No names that a shell takes for those of variables."""
VALUE = "launch.environment.A_KEY must be text without a NUL character, or a number"


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_flags_follow_our_script_or_that_of_the_user(tmp_path):
    ours = command_of(Launch(), ["--num-layers", "4"], 2)
    assert ours[-4:] == ["-m", "megatron_epp.mcore.pretrain_gpt", "--num-layers", "4"]
    assert option(ours, "--nproc-per-node") == "2"
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    theirs = command_of(Launch.of({"launch": {"script": str(script)}}), ["--epp"], 1)
    assert theirs[-4:] == ["-m", "megatron_epp.run", str(script), "--epp"]


def test_a_single_node_starts_by_itself_and_several_at_the_first_one():
    single = command_of(Launch(), [], 1)
    assert "--standalone" in single
    assert "--rdzv-endpoint" not in single
    launches = [Launch(nodes=2, node_rank=rank, master_addr="a", master_port=5, wait_seconds=7) for rank in (0, 1)]
    first, other = (command_of(launch, [], 1) for launch in launches)
    for command, is_host in ((first, 1), (other, 0)):
        assert "--standalone" not in command
        assert option(command, "--rdzv-backend") == "c10d"
        assert option(command, "--rdzv-endpoint") == "a:5"
        assert option(command, "--rdzv-conf") == f"is_host={is_host},join_timeout=7,read_timeout=7"


def test_every_node_has_a_log_of_its_own_unless_all_is_printed(tmp_path):
    assert log_of(Launch(), tmp_path) == tmp_path / "train.log"
    assert log_of(Launch(nodes=2, node_rank=1), tmp_path) == tmp_path / "train-1.log"
    assert log_of(Launch(full_log=True), tmp_path) is None


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"nodes": "two"}, "launch.nodes is 'two'; it must be of type int"),
        ({"nodes": 2, "node_rank": 2}, "node_rank is 2; it must be from 0 to 1 for launch.nodes 2"),
        ({"nodes": 0}, "launch.nodes is 0; it must be 1 or more"),
        ({"master_port": 70000}, "launch.master_port is 70000; it must be 1 or more, up to 65535"),
        ({"torchrun": '"a'}, "launch.torchrun is '\"a'; its quotes must be closed"),
        ({"full_log": 1}, "launch.full_log is 1; it must be of type bool"),
        ({"script": "nowhere.py"}, "there is no file nowhere.py"),
        ({"master_addr": "--standalone"}, "launch.master_addr is '--standalone'; it must be the name or the address"),
        *(({"name": name}, f"launch.name is {name!r}; it must") for name in NAMES),
        *(({"environment": {name: 1}}, f"launch.environment: {name!r} is not a name of a variable") for name in VARIABLES),
        *(({"environment": {"A_KEY": value}}, VALUE) for value in ["a\0b", ["a"], {"a": 1}]),
    ],
)
def test_mistakes_are_named_in_one_line(launch, words):
    with pytest.raises(SettingsError) as error:
        Launch.of({"launch": launch})
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert words != VALUE or str(error.value) == VALUE, "what may be a secret is not told"


HOSTILE = "'; touch PWNED; '$(touch PWNED)`touch PWNED`\n touch PWNED\n\"\\"


def test_the_saved_command_runs_again_as_it_is_and_no_value_is_code(tmp_path, monkeypatch):
    monkeypatch.setenv("EPP_TEST_HOSTILE", HOSTILE)
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    values = {"EPP_TEST_A": HOSTILE, "EPP_TEST_B": "<${EPP_TEST_HOSTILE}>", "EPP_TEST_C": "${EPP_TEST_UNSET:$(touch PWNED)}"}
    show = "import os, sys; print([os.environ[f'EPP_TEST_{name}'] for name in 'ABC'] + sys.argv[1:])"
    settings = {"megatron": {"lr": 1.0}, "launch": {"name": "a"}}
    save_run(tmp_path, settings, [sys.executable, "-c", show, HOSTILE], values)
    done = subprocess.run(["bash", "command.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[HOSTILE, f'<{HOSTILE}>', '$(touch PWNED)', HOSTILE]}\n"
    assert not (tmp_path / "PWNED").exists()
    assert yaml.safe_load((tmp_path / "settings.yaml").read_text()) == settings
    assert json.loads((tmp_path / "versions.json").read_text())["megatron-epp"] == megatron_epp.__version__


def modes(folder: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (folder / "command.sh", folder / "settings.yaml")}


@pytest.fixture
def plain_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("plain_umask")
def test_a_secret_is_saved_for_its_owner_alone(tmp_path):
    save_run(tmp_path, {}, ["true"], {"OMP_NUM_THREADS": 1, "TOKENIZERS_PARALLELISM": "true"})
    assert modes(tmp_path) == {0o644}
    for name in ("HF_TOKEN", "wandb_api_key", "MY_SECRETS", "PGPASSWORD"):
        for path in (tmp_path / "command.sh", tmp_path / "settings.yaml"):
            path.chmod(0o644)
        save_run(tmp_path, {}, ["true"], {name: "abc"})
        assert modes(tmp_path) == {0o600}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["command.sh", "settings.yaml", "versions.json"]


@pytest.mark.parametrize(("environment", "is_followed"), [({}, True), ({"HF_TOKEN": "abc"}, False)], ids=["usual", "secret"])
def test_a_link_in_the_place_of_a_file_is_followed_unless_the_file_is_private(tmp_path, environment, is_followed):
    linked = tmp_path / "linked"
    linked.write_text("old")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.sh").symlink_to(linked)
    save_run(tmp_path / "run", {}, ["true"], environment)
    assert (linked.read_text() != "old") == (tmp_path / "run" / "command.sh").is_symlink() == is_followed


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "command.sh").mkdir()
    with pytest.raises(SettingsError, match=r"command\.sh.* cannot be written .*set launch\.folder"):
        save_run(tmp_path, {}, ["true"], {})
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"/file/run cannot be written \(Not a directory\)"):
        save_run(tmp_path / "file" / "run", {}, ["true"], {})


def test_settings_are_saved_where_the_run_saves():
    assert folder_of(Launch(name="a"), {}) == folder_of(Launch(), {"save": os.path.join("runs", "a")})
    assert str(folder_of(Launch(folder="here"), {"save": "there"})) == "here"


def test_a_replica_has_as_many_ranks_as_its_parallel_sizes_multiply_to():
    assert world_of({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}) == 8


# ---- variables: references to the environment stay references in all that is saved and shown -------------------------

SECRET = 'hunter2-"$x'
REFERENCES = ["${EPP_TEST_SOURCE}", "${EPP_TEST_SOURCE:other}", "${oc.env:EPP_TEST_SOURCE}", "${oc.env:EPP_TEST_SOURCE,other}"]


@pytest.fixture(autouse=True)
def _source(monkeypatch):
    monkeypatch.setenv("EPP_TEST_SOURCE", SECRET)
    monkeypatch.setenv("EPP_TEST_DIGITS", "0123_4")
    for name in ("EPP_TEST_UNSET", "EPP_TEST_API_KEY", "EPP_TEST_A"):
        monkeypatch.delenv(name, raising=False)


def loaded(tmp_path, values, *overrides):
    """The section as it comes out of a file that includes another, and overrides."""
    (tmp_path / "under.yaml").write_text(yaml.safe_dump({"launch": {"environment": values}, "megatron": {"save": "runs/a"}}))
    (tmp_path / "over.yaml").write_text("include: under.yaml\nlaunch: {environment: {EPP_TEST_PLAIN: 1}}")
    settings = load_settings([tmp_path / "over.yaml"], overrides)
    return settings, Launch.of(settings).environment


def run_saved(folder, *drop):
    """The saved command, where some variables are not set."""
    words = [word for name in drop for word in ("-u", name)]
    return subprocess.run(["env", *words, "bash", folder / "command.sh"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_value_from_the_environment_is_saved_as_where_it_came_from(reference, tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_API_KEY": f"Bearer {reference}"})
    assert environment_to_set(values) == {"EPP_TEST_API_KEY": f"Bearer {SECRET}", "EPP_TEST_PLAIN": "1"}
    save_run(tmp_path / "run", settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY"'], values)
    saved = {path.name: path.read_text() for path in (tmp_path / "run").iterdir()}
    assert not [name for name, text in saved.items() if "hunter2" in text]
    assert f"Bearer {reference}" in saved["settings.yaml"]
    assert run_saved(tmp_path / "run").stdout == f"Bearer {SECRET}\n"
    assert load_settings([tmp_path / "run" / "settings.yaml"]) == settings
    alone = run_saved(tmp_path / "run", "EPP_TEST_SOURCE")
    assert alone.returncode != 0
    assert "EPP_TEST_SOURCE: is not set, and EPP_TEST_API_KEY takes its value" in alone.stderr
    assert alone.stdout == ""
    assert "hunter2" not in "".join(exports(values, masked=True))


def test_a_variable_that_is_handed_on_must_be_there_again(tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_SOURCE": "${EPP_TEST_SOURCE}"})
    assert environment_to_set(values) == {"EPP_TEST_PLAIN": "1"}
    save_run(tmp_path / "run", settings, ["true"], values)
    assert "hunter2" not in (tmp_path / "run" / "settings.yaml").read_text()
    assert run_saved(tmp_path / "run").returncode == 0
    assert "EPP_TEST_SOURCE: is not set" in run_saved(tmp_path / "run", "EPP_TEST_SOURCE").stderr


def test_a_secret_that_is_given_is_masked_where_it_is_shown_and_runs_where_it_is_saved(tmp_path):
    settings, values = loaded(tmp_path, {"EPP_TEST_API_KEY": SECRET, "OMP_OTHER": "shown"})
    shown = exports(values, masked=True)
    assert shown == ["export EPP_TEST_API_KEY='***'", "export EPP_TEST_PLAIN=1", "export OMP_OTHER=shown"]
    save_run(tmp_path / "run", settings, ["sh", "-c", 'echo "$EPP_TEST_API_KEY"'], values)
    assert run_saved(tmp_path / "run").stdout == f"{SECRET}\n"


def test_what_the_environment_has_wins():
    values = {"EPP_TEST_SOURCE": "theirs", "EPP_TEST_OTHER": 1}
    assert environment_to_set(values) == {"EPP_TEST_OTHER": "1"}
    assert exports(values) == ["export EPP_TEST_OTHER=1"]


@pytest.mark.parametrize(
    ("values", "overrides", "wanted"),
    [
        *(({"EPP_TEST_A": null}, [], {}) for null in (None, "${EPP_TEST_UNSET:null}", "${oc.env:EPP_TEST_UNSET,null}")),
        ({"EPP_TEST_A": "${EPP_TEST_DIGITS}"}, [], {"EPP_TEST_A": "0123_4"}),  # text as it is, and no number
        ({"EPP_TEST_A": "${EPP_TEST_UNSET:1e3}"}, [], {"EPP_TEST_A": "1e3"}),
        ({"EPP_TEST_A": "${megatron.save}/${EPP_TEST_SOURCE}"}, [], {"EPP_TEST_A": f"runs/a/{SECRET}"}),
        ({}, ["launch.environment={EPP_TEST_A: '${EPP_TEST_SOURCE}'}"], {"EPP_TEST_A": SECRET}),
    ],
)
def test_values_are_texts_of_the_environment_and_other_settings_and_null_leaves_one_out(values, overrides, wanted, tmp_path):
    settings, variables = loaded(tmp_path, values, *overrides)
    assert environment_to_set(variables) == wanted | {"EPP_TEST_PLAIN": "1"}
    assert len(exports(variables)) == len(wanted) + 1
    assert "hunter2" not in str(settings), "references are kept"


@pytest.mark.parametrize("reference", ["${EPP_TEST_UNSET}", "${oc.env:EPP_TEST_UNSET}"])
def test_a_variable_that_is_not_set_is_named_with_what_would_do(reference):
    with pytest.raises(SettingsError) as error:
        environment_to_set({"EPP_TEST_API_KEY": reference})
    assert str(error.value) == (
        "launch.environment.EPP_TEST_API_KEY: EPP_TEST_UNSET is not set: export it, or give a default as "
        "${EPP_TEST_UNSET:default}"
    )
