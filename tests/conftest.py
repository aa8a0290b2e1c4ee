"""Shared by all tests: the sets `fast` and `slow`, hypothesis without deadlines, and the order of files."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.fast import FAST, LONG
from tests.support.processes import Processes

settings.register_profile("patient", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("patient"), max_examples=12, derandomize=True)

TESTS = Path(__file__).parent
FOLDERS = ("slurm", "browser", "cpu", "gpu", "mcore", "callers", "pure", "contrib")
"""In the order in which they run: what waits most first, many short tests last, so that processes end together, and behind
all others the tests of what training does not need.

What asks torch for a GPU's tensors comes before Megatron: its stand-ins for CUDA stay in the process that read its flags.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, metavar="N", help="run N test files at once, each in a process of its own")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("fast" if _is_fast(config) else "patient")
    if (number := config.option.processes) is not None:
        config.pluginmanager.register(Processes(number))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, files without a fast test are not even imported."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and _is_fast(config) and _name(collection_path) not in FAST else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        left_out = FAST.get(_name(item.path))
        is_left_out = left_out is None or item.name.partition("[")[0] in left_out
        if not is_left_out and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int, int]:
    folder = item.path.parent.name
    return folder == "contrib", _turn(_name(item.path)), FOLDERS.index(folder)


def _turn(name: str) -> int:
    return LONG.index(name) if name in LONG else len(LONG)


def _is_fast(config: pytest.Config) -> bool:
    return config.option.markexpr == "fast"


def _name(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else path.name
