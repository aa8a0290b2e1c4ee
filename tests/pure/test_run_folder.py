"""A folder takes one run at a time, and is free again when the process that held it has ended, however it ends."""

from __future__ import annotations

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

from megatron_epp.launch.run_folder import LOCK, hold
from megatron_epp.plan.errors import EppError

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
