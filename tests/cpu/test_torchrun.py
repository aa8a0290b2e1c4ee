"""Runs that do not end well end in one line of the launcher's, below what the process itself said."""

import os
import signal
import subprocess
import sys
import time

LAUNCH = [sys.executable, "-m", "megatron_epp.launch.torchrun", "--standalone", "--nproc-per-node", "2"]


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_a_process_that_fails_is_named_with_its_exit_code(tmp_path):
    fails = script(tmp_path, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('raise the cap')\ntime.sleep(60)\n")
    done = subprocess.run([*LAUNCH, fails], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "raise the cap" in done.stderr
    assert done.stderr.splitlines()[-1] == "megatron-epp: rank 1 failed first, with exit code 1: its messages are above"
    assert "Traceback" not in done.stderr


def test_a_signal_is_named(tmp_path):
    waits = script(tmp_path, f"import pathlib, time\npathlib.Path({str(tmp_path / 'up')!r}).touch()\ntime.sleep(60)\n")
    running = subprocess.Popen([*LAUNCH, waits], stderr=subprocess.PIPE, text=True)
    end_s = time.monotonic() + 90
    while not (tmp_path / "up").exists() and time.monotonic() < end_s:
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=90)
    assert running.returncode == 1
    assert said.splitlines()[-1] == "megatron-epp: stopped by signal SIGTERM"
    assert "Traceback" not in said


def test_what_ends_well_says_nothing(tmp_path):
    done = subprocess.run([*LAUNCH, script(tmp_path, "")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "megatron-epp" not in done.stderr


def test_a_folder_for_temporary_files_that_cannot_be_made_is_said_in_one_line(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import tempfile\ntempfile.tempdir = '/proc/nowhere'\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([*LAUNCH, script(tmp_path, "")], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "megatron-epp: cannot make a folder for temporary files (No such file or directory): set TMPDIR to one with space"
    )
    assert "Traceback" not in done.stderr
