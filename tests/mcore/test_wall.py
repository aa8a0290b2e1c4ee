"""A training with the default planner needs core alone: nothing of contrib, and a limited part of the package."""

from pathlib import Path

import pytest

import megatron_epp
from tests.mcore.test_ways_in import epp_flags
from tests.support.mcore.launch import alone

PACKAGE = Path(megatron_epp.__file__).parent
RECORDER = """
import os, sys

def record(event, arguments):
    if event == "import" and arguments[0].startswith("megatron_epp"):
        with open(os.environ["IMPORTED"], "a") as file:
            file.write(f"{os.getpid()} {arguments[0]}\\n")

sys.addaudithook(record)
"""
"""Writes what every Python process imports of the package, as it does so."""
MOST_LINES = 42_000


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Modules of the package that the processes of a training of two iterations import."""
    found, hook = tmp_path_factory.mktemp("imported") / "modules.txt", tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(RECORDER)
    flags = epp_flags(tmp_path_factory.mktemp("documents"), 1)
    finished = alone("-m", "megatron_epp.mcore.pretrain_gpt", *flags, env={"PYTHONPATH": str(hook), "IMPORTED": str(found)})
    assert finished.returncode == 0, finished.output[-5000:]
    lines = [line.split() for line in found.read_text().splitlines()]
    assert len({process for process, _ in lines}) >= 2, "one process trains, another one plans"
    return {module for _, module in lines}


def num_lines(module: str) -> int:
    """Lines of a module; 0 for a name that is looked for, as `from package import name` does, and is none."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text().count("\n") if file.is_file() else 0


def test_it_imports_no_module_of_contrib(imported: set[str]) -> None:
    assert "megatron_epp.planner.search.greedy" in imported
    assert [name for name in imported if name.startswith("megatron_epp.contrib")] == []


def test_it_imports_a_limited_part_of_the_package(imported: set[str]) -> None:
    lines = sum(map(num_lines, imported))
    assert lines < MOST_LINES, f"{lines:,} lines"
