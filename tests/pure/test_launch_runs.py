"""Short runs that fail say why, as far as their logs do; and the folder that a run holds."""

import errno
import fcntl
import logging
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.launch import runs
from megatron_epp.launch.run_folder import LOCK, hold
from megatron_epp.launch.runs import reason_in
from megatron_epp.plan import EppError


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
        assert command[1:4] == ["-m", "megatron_epp.launch.torchrun", "--standalone"]
        assert command[command.index("--nproc-per-node") + 1] == "2"
        assert command[-4:] == ["--num-layers", "4", "--epp-report-dir", str(tmp_path)]
        (tmp_path / "iterations.jsonl").write_text('{"iteration": 1, "tokens": 50, "loss": 2.5}\n')
        with log.open("a") as output:
            output.write(" iteration        1/       1 | elapsed time per iteration (ms): 10.0 |\n")
        return 0

    monkeypatch.setattr(runs, "count_gpus", lambda: 2)
    monkeypatch.setattr(runs, "_exit_code", stand_in)
    run = runs.train(tmp_path, 2, {"epp": True, "num_layers": 4})
    assert run.losses == [2.5]
    assert run.tokens_per_second == 5000


@pytest.mark.parametrize(
    ("script", "limit_s", "code"), [("echo why >&2; exit 3", 60, 3), ("echo why; exec sleep 60", 0.5, None)]
)
def test_what_a_command_says_is_in_the_log_however_it_ends(tmp_path, script, limit_s, code):
    log = tmp_path / "log"
    log.write_text("first\n")
    assert runs._exit_code(["sh", "-c", script], log, limit_s, {}) == code
    assert log.read_text() == "first\nwhy\n"


# ---- a folder takes one run at a time, and is free again however the process that held it ended ------------------------


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
    assert first.stdout is not None
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


@pytest.mark.parametrize("content", ["[" * 4000, '{"run": "\\u001b[2J"}', "\0"])
def test_a_damaged_lock_holds_all_the_same(tmp_path: Path, content: str):
    (tmp_path / LOCK).write_text(content)
    with (tmp_path / LOCK).open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, 0, 0, 0))
        with pytest.raises(EppError, match="another run writes into") as refused:
            hold(tmp_path, "second")
    assert str(refused.value).isprintable()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=r"file/run cannot be written \(Not a directory\)"):
        hold(tmp_path / "file" / "run", "run")


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    with caplog.at_level(logging.WARNING):
        hold(tmp_path, "run")
    assert "cannot be locked (No locks available)" in caplog.text
