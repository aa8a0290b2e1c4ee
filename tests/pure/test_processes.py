"""Test files run in processes forked from the one that has collected them (`tests/support/processes.py`)."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

CONFTEST = """
from tests.support.processes import Processes

def pytest_configure(config):
    config.pluginmanager.register(Processes(2))
"""
STATEFUL = """
import json, os, pathlib

def test_the_module_is_as_it_was_collected():
    assert not hasattr(json, "mark")
    json.mark = True

def test_tests_of_a_file_share_a_process():
    assert json.mark

def test_a_folder_is_the_tests_own(tmp_path):
    (tmp_path / "file").touch(exist_ok=False)
"""
FAILING = """
import pytest

@pytest.fixture(scope="module")
def resource():
    yield 7
    print("closed behind the last test")
    assert False, "the end of the fixture"

def test_what_it_printed_is_shown(resource):
    print("said by the test")
    assert resource == 8

@pytest.mark.skip(reason="a reason")
def test_skipped():
    pass

def test_passes(resource):
    pass
"""
DYING = """
import os

def test_before():
    pass

def test_that_ends_its_process():
    os._exit(3)

def test_behind():
    pass
"""
ENDING = """
import atexit, os

def test_passes():
    atexit.register(os._exit, 4)
"""
"""It ends its process behind the last test."""


def run(folder: Path, *arguments: str, **files: str) -> str:
    """Run files of tests, each with a process of its own, and return what pytest prints."""
    for name, text in {"conftest": CONFTEST, **files}.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, *["-m", "pytest", "-p", "no:cacheprovider", "-raq", "--disable-warnings"], f"--rootdir={folder}"]
    return subprocess.run([*command, *arguments, folder], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_files_see_nothing_of_each_other_and_what_fails_or_ends_its_process_is_told(tmp_path: Path):
    stateful = {f"test_stateful_{number}": STATEFUL for number in range(3)}
    files = {"test_dying": DYING, "test_ending": ENDING, "test_failing": FAILING, **stateful}
    output = run(tmp_path, "--junitxml", f"{tmp_path}/results.xml", **files)
    assert re.search(r"3 failed, 12 passed, 1 skipped,.* 2 errors in", output)
    shown = "said by the test", "closed behind the last test", "a reason"
    assert [text for text in shown if text not in output] == []
    assert re.findall(r"FAILED \S*test_dying.py::(\w+)", output) == ["test_that_ends_its_process", "test_behind"]
    no_result = re.findall("^no result: the process of the file's tests ended with exit code (.)", output, re.MULTILINE)
    assert sorted(no_result) == ["3", "3", "4"]
    assert (tmp_path / "results.xml").read_text().count("<testcase") == 17


def test_with_x_the_first_failure_ends_all(tmp_path: Path):
    slow = "import time\n\ndef test_waits():\n    time.sleep(600)\n"
    output = run(tmp_path, "-x", test_a=slow, test_b="def test_fails():\n    assert False\n", test_c=STATEFUL)
    assert "1 failed" in output
    assert " passed" not in output
