"""Shared by all tests: the sets `fast` and `slow`, hypothesis without deadlines, the order of files, several files at once."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.durations import Recorder, is_fast, seconds_of
from tests.support.processes import Processes

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine for `tests/gpu` may lack it, and they need none
    settings = None
else:
    settings.register_profile("patient", deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fast", settings.get_profile("patient"), max_examples=12, derandomize=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, metavar="N", help="run N test files at once, each in a process of its own")
    parser.addoption("--record-durations", action="store_true", help="record how long the tests take in tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if settings is not None:
        settings.load_profile("fast" if _is_fast_set(config) else "patient")
    if (number := config.option.processes or 2 * _is_fast_set(config)) > 0:
        config.pluginmanager.register(Processes(number))
    if config.option.record_durations:
        if config.option.keyword or _is_fast_set(config):
            raise pytest.UsageError("--record-durations needs all tests of a file: leave out -k and -m fast")
        config.pluginmanager.register(Recorder())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast`, files without a fast test are not even imported."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and _is_fast_set(config) and not is_fast(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is None and is_fast(item.path, item.name.partition("[")[0]):
            item.add_marker(pytest.mark.fast)
    if config.option.processes:  # the longest first, so that all end together; with -x the shortest, which may end it soon
        direction = 1 if config.option.maxfail else -1
        items.sort(key=lambda item: direction * seconds_of(item.path))


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.mcore.matrix import Matrix  # which imports torch

    return Matrix.of(request, tmp_path_factory)


def _is_fast_set(config: pytest.Config) -> bool:
    return config.option.markexpr == "fast"
