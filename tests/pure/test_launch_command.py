"""The command of a run, and what is saved beside it."""

import json
import os
import shlex
import socket
import subprocess

import pytest
import yaml

import megatron_epp
from megatron_epp.launch.command import Launch, command_of, environment_of, folder_of, save_run, world_of
from megatron_epp.launch.meet import PortError
from megatron_epp.launch.settings import SettingsError


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


def test_a_single_node_takes_a_free_port_and_a_taken_one_is_refused():
    assert int(option(command_of(Launch(), [], 1), "--master-port")) > 0
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} cannot be used here .*MASTER_PORT"):
            command_of(Launch(master_port=port), [], 1)
        other_node = command_of(Launch(nodes=2, node_rank=1, master_port=port), [], 1)  # it does not listen
        assert option(other_node, "--master-port") == str(port)


def test_mistakes_are_named():
    assert "launch.node is unknown; did you mean 'nodes'?" in refused(node=2)
    assert "launch.nodes is 'two'; it must be of type int" in refused(nodes="two")
    assert "node_rank 2 is none of launch.nodes 2" in refused(nodes=2, node_rank=2, master_port=1)
    assert "launch.nodes is 0; it must be 1 or more" in refused(nodes=0)
    assert "launch.master_port is 70000; it must be 0 or more, up to 65535" in refused(master_port=70000)
    assert "nodes must agree on a port" in refused(nodes=2)
    assert "there is no file nowhere.py" in refused(script="nowhere.py")


def test_what_the_environment_has_wins(monkeypatch):
    monkeypatch.setenv("EPP_TEST_SET", "mine")
    launch = Launch(environment={"EPP_TEST_SET": "theirs", "EPP_TEST_OTHER": 1})
    assert environment_of(launch) == {"EPP_TEST_OTHER": "1"}


def test_the_saved_command_runs_again_as_it_is(tmp_path):
    settings = {"megatron": {"lr": 1.0}, "launch": {"name": "a"}}
    save_run(tmp_path / "run", settings, ["echo", "two words", "$EPP_TEST_VALUE"], {"EPP_TEST_VALUE": "x y"})
    done = subprocess.run(["bash", tmp_path / "run" / "command.sh"], capture_output=True, text=True, check=True)
    assert done.stdout == "two words $EPP_TEST_VALUE\n"
    assert f"export EPP_TEST_VALUE={shlex.quote('x y')}" in (tmp_path / "run" / "command.sh").read_text()
    assert yaml.safe_load((tmp_path / "run" / "settings.yaml").read_text()) == settings
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["megatron-epp"] == megatron_epp.__version__


def test_settings_are_saved_where_the_run_saves():
    assert folder_of(Launch(name="a"), {}) == folder_of(Launch(), {"save": os.path.join("runs", "a")})
    assert str(folder_of(Launch(folder="here"), {"save": "there"})) == "here"


def test_a_replica_has_as_many_ranks_as_its_parallel_sizes_multiply_to():
    assert world_of({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}) == 8
