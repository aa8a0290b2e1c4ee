"""Processes that belong to another end with it, and its temporary files are removed, however it ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_epp.launch import lifetime
from megatron_epp.launch.lifetime import FOLDER_VARIABLE, is_abandoned, launcher_folder
from tests.support.calls import wait_for

LIMIT_S = 60
CHILD = "import os, time, megatron_epp.launch.lifetime as of; of.{how}(); print(os.getpid(), flush=True); time.sleep(600)"
PARENT = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(monkeypatch):
    """For temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory() as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr(tempfile, "tempdir", made)
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        yield Path(made)


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def python(program, stderr=None, **variables):
    pipe, command = subprocess.PIPE, [sys.executable, "-c", program]
    return subprocess.Popen(command, env=os.environ | variables, stdout=pipe, stderr=stderr, text=True)


@pytest.mark.parametrize("is_stopped", [False, True])
@pytest.mark.parametrize(
    ("how", "variables", "outlives"),
    [
        ("end_with_parent", {}, False),
        ("end_with_launcher", {"TORCHELASTIC_RUN_ID": "a"}, False),
        ("end_with_launcher", {}, True),  # no torchrun has started it
    ],
)
def test_a_process_ends_when_its_parent_is_killed(is_stopped, how, variables, outlives, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    parent = python(PARENT.format(child=CHILD.format(how=how)), **variables)
    child = int(parent.stdout.readline())
    if is_stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    if outlives:
        assert not has_ended(child)
        os.kill(child, signal.SIGKILL)
    wait_for(lambda: has_ended(child), LIMIT_S, f"process {child} has ended")


def test_a_rank_that_comes_up_after_its_launcher_was_killed_ends_at_once(folder):
    (folder / "lock").touch()
    rank = python(CHILD.format(how="end_with_launcher"), TORCHELASTIC_RUN_ID="a", **{FOLDER_VARIABLE: str(folder)})
    assert (rank.communicate(timeout=LIMIT_S)[0], rank.returncode) == ("", -signal.SIGKILL)


IN_MULTIPROCESSING = """
import multiprocessing, os, signal, time
from functools import partial
from megatron_epp.launch.lifetime import run_until_parent_ends
process = multiprocessing.get_context({method!r}).Process(target=partial(run_until_parent_ends, time.sleep), args=(600,))
process.start()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_process_of_multiprocessing_ends_when_its_parent_is_killed(method):
    parent = python(IN_MULTIPROCESSING.format(method=method))
    child = int(parent.communicate(timeout=LIMIT_S)[0])
    assert parent.returncode == -signal.SIGKILL
    wait_for(lambda: has_ended(child), LIMIT_S, f"process {child} has ended")


def exit_with(code):
    raise SystemExit(code)


def test_a_process_of_multiprocessing_ends_as_it_would_otherwise():
    for method in ("spawn", "fork"):
        target = partial(lifetime.run_until_parent_ends, exit_with)
        process = multiprocessing.get_context(method).Process(target=target, args=(3,))
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode == 3


def test_a_folder_is_there_while_its_launcher_is(folder):
    with launcher_folder() as ours:
        assert (os.environ[FOLDER_VARIABLE], ours.parent) == (str(ours), folder)
        assert not is_abandoned(ours)
        with launcher_folder() as other:
            assert other != ours
            assert ours.is_dir()
        assert not other.exists()
        os.environ[FOLDER_VARIABLE] = str(ours)
    assert list(folder.iterdir()) == []
    assert FOLDER_VARIABLE not in os.environ


def test_a_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(folder):
    program = (
        "import os, signal; from megatron_epp.launch.lifetime import *; context = launcher_folder();"
        "made = context.__enter__();"
        "(made / 'file').touch(); print(made, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    left = Path(python(program).communicate(timeout=LIMIT_S)[0].strip())
    assert is_abandoned(left)
    others = folder / "epp-is-no-folder-of-ours", folder / "other"
    for other in others:
        other.mkdir()
    (folder / f"{left.name}x").symlink_to(others[1])
    with launcher_folder():
        assert [left.exists(), *(other.is_dir() for other in others)] == [False, True, True]


def test_sockets_are_in_the_launchers_folder_where_their_paths_are_short_enough(folder):
    program = (
        "import os; from megatron_epp.launch.lifetime import *; keep_sockets_in_folder();"
        "from multiprocessing.connection import Listener; print(Listener(family='AF_UNIX').address);"
        "print(os.environ.get('EPP_LAUNCHER_FOLDER'))"
    )
    usable, too_long, missing = folder / "usable", folder / ("long" * 20), folder / "missing"
    usable.mkdir()
    too_long.mkdir()
    for given, used in ((usable, usable), (too_long, None), (missing, None)):
        address, told = python(program, **{FOLDER_VARIABLE: str(given)}).communicate(timeout=LIMIT_S)[0].splitlines()
        assert (Path(address).parents[1], told) == (used or folder, str(used))


def test_without_a_launcher_nothing_is_made(folder):
    lifetime.keep_sockets_in_folder()
    assert list(folder.iterdir()) == []


def test_a_process_that_outlives_its_launcher_ends_without_complaint_about_the_folder(folder):
    program = (
        "import os, shutil; from megatron_epp.launch.lifetime import *; keep_sockets_in_folder();"
        "from multiprocessing.connection import Listener; Listener(family='AF_UNIX');"
        "shutil.rmtree(os.environ['EPP_LAUNCHER_FOLDER'])"
    )
    (usable := folder / "usable").mkdir()
    assert python(program, stderr=subprocess.PIPE, **{FOLDER_VARIABLE: str(usable)}).communicate(timeout=LIMIT_S)[1] == ""
