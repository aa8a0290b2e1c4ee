"""The command of a run, and what is saved next to it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import megatron_epp
from megatron_epp.launch.command import Launch, command_of, folder_of, log_of, save_run, world_of
from megatron_epp.launch.yaml_settings import SettingsError


def refused(**launch: object) -> str:
    with pytest.raises(SettingsError) as error:
        Launch.of({"launch": launch})
    return str(error.value)


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


def test_mistakes_are_named():
    assert "launch.node is unknown; did you mean 'nodes'?" in refused(node=2)
    assert "launch.nodes is 'two'; it must be of type int" in refused(nodes="two")
    assert "node_rank is 2; it must be from 0 to 1 for launch.nodes 2" in refused(nodes=2, node_rank=2)
    assert "launch.nodes is 0; it must be 1 or more" in refused(nodes=0)
    assert "launch.master_port is 70000; it must be 1 or more, up to 65535" in refused(master_port=70000)
    assert "launch.torchrun is '\"a'; its quotes must be closed" in refused(torchrun='"a')
    assert "launch.full_log is 1; it must be of type bool" in refused(full_log=1)
    assert "there is no file nowhere.py" in refused(script="nowhere.py")
    assert "launch.master_addr is '--standalone'; it must be the name or the address" in refused(master_addr="--standalone")


@pytest.mark.parametrize("name", ["../../x", "..", ".hidden", "-rf", "a/b", "a\\b", "", "a\nb", "/tmp"])
def test_a_name_of_a_run_is_that_of_a_folder_in_runs(name):
    message = refused(name=name)
    assert message.startswith(f"launch.name is {name!r}; it must")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("name", ["X=1; touch PWNED; export Y", "2ND", "A B", "A\nB", "", "Ä", "A-B", 1])
def test_a_variable_has_a_name_that_a_shell_takes_for_one(name):
    message = refused(environment={name: 1})
    assert message.startswith(f"launch.environment: {name!r} is not a name of a variable")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("value", ["a\0b", ["a"], {"a": 1}])
def test_a_variable_has_a_value_that_an_environment_can_hold_and_a_refusal_does_not_tell_it(value):
    assert refused(environment={"A_KEY": value}) == "launch.environment.A_KEY must be text without a NUL character, or a number"


def test_the_saved_command_runs_again_as_it_is(tmp_path):
    settings = {"megatron": {"lr": 1.0}, "launch": {"name": "a"}}
    save_run(tmp_path / "run", settings, ["echo", "two words", "$EPP_TEST_VALUE"], {"EPP_TEST_VALUE": "x y"})
    done = subprocess.run(["bash", tmp_path / "run" / "command.sh"], capture_output=True, text=True, check=True)
    assert done.stdout == "two words $EPP_TEST_VALUE\n"
    assert f"export EPP_TEST_VALUE={shlex.quote('x y')}" in (tmp_path / "run" / "command.sh").read_text()
    assert yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text()) == settings
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["megatron-epp"] == megatron_epp.__version__


HOSTILE = "'; touch PWNED; '$(touch PWNED)`touch PWNED`\n touch PWNED\n\"\\"


def test_no_value_is_code_in_the_saved_command(tmp_path, monkeypatch):
    monkeypatch.setenv("EPP_TEST_HOSTILE", HOSTILE)
    monkeypatch.delenv("EPP_TEST_UNSET", raising=False)
    values = {"EPP_TEST_A": HOSTILE, "EPP_TEST_B": "<${EPP_TEST_HOSTILE}>", "EPP_TEST_C": "${EPP_TEST_UNSET:$(touch PWNED)}"}
    show = "import os; print([os.environ[name] for name in ('EPP_TEST_A', 'EPP_TEST_B', 'EPP_TEST_C')])"
    save_run(tmp_path, {}, [sys.executable, "-c", show, HOSTILE], values)
    done = subprocess.run(["bash", "command.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[HOSTILE, f'<{HOSTILE}>', '$(touch PWNED)']}\n"
    assert not (tmp_path / "PWNED").exists()


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
