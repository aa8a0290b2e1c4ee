"""Runs that do not end well end in one line of the launcher's, below what the process itself said."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed.run import get_args_parser

from megatron_epp.launch.machine import free_port
from megatron_epp.launch.yaml_settings import Launch
from megatron_epp.tools.cli.train import command_of

LAUNCH = [sys.executable, "-m", "megatron_epp.tools.launch.torchrun", "--standalone", "--nproc-per-node", "2"]


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def last_line(returncode, said, expected_code=1):
    """The last line of a start that ended badly, and said so without a traceback of the launcher's."""
    assert returncode == expected_code
    assert not re.search(r"Traceback(?:.*\n)*.*launch/torchrun", said)
    return said.splitlines()[-1]


def test_a_process_that_fails_is_named_with_its_exit_code(tmp_path):
    fails = script(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('raise the cap')\ntime.sleep(60)\n")
    done = subprocess.run([*LAUNCH, fails], capture_output=True, text=True, timeout=120, check=False)
    assert "raise the cap" in done.stderr
    expected = "megatron-epp: rank 1 failed first, with exit code 1: its messages are above"
    assert last_line(done.returncode, done.stderr) == expected


AS_TRAIN = command_of(Launch(), [], 1)
AS_TRAIN = AS_TRAIN[: AS_TRAIN.index("megatron_epp.mcore.pretrain_gpt") - 1]
"""Command that `megatron-epp train` becomes, without the script."""


@pytest.mark.parametrize(
    ("launch", "sent", "code"),
    [(LAUNCH, signal.SIGTERM, 1), (LAUNCH, signal.SIGINT, 130), (AS_TRAIN, signal.SIGINT, 130)],
    ids=["SIGTERM", "Ctrl-C, two processes", "Ctrl-C, as train starts one"],
)
def test_a_signal_is_named(tmp_path, launch, sent, code):
    waits = script(tmp_path, f"import pathlib, time\npathlib.Path({str(tmp_path / 'up')!r}).touch()\ntime.sleep(60)\n")
    running = subprocess.Popen([*launch, waits], stderr=subprocess.PIPE, text=True, start_new_session=True)
    end_s = time.monotonic() + 90
    while not (tmp_path / "up").exists() and time.monotonic() < end_s:
        time.sleep(0.1)
    os.killpg(running.pid, sent)  # a terminal's Ctrl-C reaches all processes of its group
    _, said = running.communicate(timeout=90)
    assert last_line(running.returncode, said, code) == f"megatron-epp: stopped by signal {sent.name}"


def test_a_signal_that_hits_torchs_clock_is_named_too(tmp_path):
    """`torch.distributed.elastic.metrics.prof` reads a variable in `finally` that a signal has left unset."""
    strikes = """
import signal, sys, time
from torch.distributed.elastic.metrics import api
from torch.distributed.elastic.multiprocessing.api import SignalException
from megatron_epp.tools.launch.torchrun import main

def clock():
    raise SignalException("interrupted", signal.SIGINT)

api.time = type("clock", (), {"time": staticmethod(clock)})
sys.argv[1:] = ["--standalone", "--nproc-per-node", "1", sys.argv[0]]
main()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, script(tmp_path, strikes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "UnboundLocalError" not in done.stderr
    assert last_line(done.returncode, done.stderr, 130) == "megatron-epp: stopped by signal SIGINT"


def test_ctrl_c_while_the_launcher_starts_is_named_too(tmp_path):
    interrupts = "import _thread\n_thread.interrupt_main()\nimport time\ntime.sleep(60)\n"
    (tmp_path / "torch" / "distributed").mkdir(parents=True)
    for folder in ("torch", "torch/distributed"):
        (tmp_path / folder / "__init__.py").write_text("" if folder == "torch" else interrupts)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = ["env", "--default-signal=INT", *LAUNCH, script(tmp_path, "")]  # a shell's jobs in the background ignore it
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert last_line(done.returncode, done.stderr, 130) == "megatron-epp: stopped by signal SIGINT"


def test_a_folder_for_temporary_files_that_cannot_be_made_is_said_in_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import tempfile\ntempfile.tempdir = '/proc/nowhere'\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([*LAUNCH, script(tmp_path, "")], capture_output=True, text=True, env=environment, check=False)
    expected = (
        "megatron-epp: cannot make a folder for temporary files (No such file or directory): set TMPDIR to one with space"
    )
    assert last_line(done.returncode, done.stderr) == expected


def node(rank, port, path, **launch):
    """Start one of two nodes as `megatron-epp train` does, with a script instead of training."""
    command = command_of(Launch(nodes=2, node_rank=rank, master_port=port, **launch), [], 1)
    starter = [*command[: command.index("megatron_epp.mcore.pretrain_gpt") - 1], path]
    return subprocess.Popen(starter, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_nodes_find_each_other_at_the_first_one_and_say_nothing_where_all_ends_well(tmp_path):
    says = script(tmp_path, "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    port = free_port()
    nodes = [node(rank, port, says) for rank in (1, 0)]
    said = [one.communicate(timeout=120) for one in nodes]
    assert [one.returncode for one in nodes] == [0, 0], said
    assert sorted(output for output, _ in said) == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert not any("megatron-epp" in errors for _, errors in said)


def test_a_node_that_is_missing_ends_the_other_in_one_line(tmp_path):
    waits = node(0, free_port(), script(tmp_path, ""), wait_seconds=1)
    _, said = waits.communicate(timeout=120)
    expected = r"cannot reach all others, or has lost them \(RendezvousTimeoutError\): .*launch.wait_seconds"
    assert re.search(expected, last_line(waits.returncode, said))


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        first = node(0, port, script(tmp_path, ""))
        _, said = first.communicate(timeout=120)
    expected = rf"cannot reach all others, .*port: {port}, .*EADDRINUSE.*check MASTER_ADDR, MASTER_PORT"
    assert re.search(expected, last_line(first.returncode, said))


def test_options_of_torchrun_that_the_user_gives_take_precedence():
    launch = Launch(nodes=2, torchrun="--rdzv-backend etcd-v2 --rdzv-endpoint 'etcd:2379' --max-restarts 2")
    known = get_args_parser().parse_args(command_of(launch, ["--lr", "1"], 4)[3:])
    assert (known.rdzv_backend, known.rdzv_endpoint, known.max_restarts) == ("etcd-v2", "etcd:2379", 2)
    assert known.training_script == "megatron_epp.mcore.pretrain_gpt"
    assert known.training_script_args == ["--lr", "1"]
