"""How long test files and tests take, as recorded in `tests/durations.json` by `pytest --record-durations`.

The order of files and the set `fast` follow from it. What is not in it is new, and fast.
"""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
RECORDED = TESTS / "durations.json"
LONG_S = 0.5
"""A test, with all its parameters, or what a file sets up for its tests, is fast if it takes less."""
LONG_FILE_S = 6.0
"""A file that takes longer has no fast tests: they share what takes long, and the first one would pay for it."""
UNKNOWN_S = 5.0
"""Taken for the duration of a file that is not recorded."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Durations of a file's tests.

    Attributes:
        seconds: of the file.
        setup_seconds: of them for fixtures.
        long_tests: seconds of the tests that are not fast, by name.
        num_short_tests: how many others there are.
    """

    seconds: float
    setup_seconds: float
    long_tests: dict[str, float]
    num_short_tests: int

    @property
    def fast_tests_exist(self) -> bool:
        return self.seconds < LONG_FILE_S and self.setup_seconds < LONG_S and self.num_short_tests > 0


@cache
def recorded() -> dict[str, Duration]:
    return {name: Duration(**kept) for name, kept in json.loads(RECORDED.read_text()).items()} if RECORDED.exists() else {}


def name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else path.name


def seconds_of(path: Path) -> float:
    kept = recorded().get(name_of(path))
    return UNKNOWN_S if kept is None else kept.seconds


def is_fast(path: Path, test: str | None = None) -> bool:
    kept = recorded().get(name_of(path))
    return kept is None or (kept.fast_tests_exist and test not in kept.long_tests)


class Recorder:
    """Plugin that records the durations of the files that run."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        seconds = self._seconds[file.removeprefix("tests/")][test.partition("[")[0]]
        seconds[report.when == "call"] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {name: asdict(duration) for name, duration in recorded().items() if (TESTS / name).exists()}
        for name, tests in self._seconds.items():
            setup, calls = (sum(seconds[is_call] for seconds in tests.values()) for is_call in (False, True))
            long = {test: round(seconds[True], 1) for test, seconds in tests.items() if seconds[True] >= LONG_S}
            kept[name] = asdict(Duration(round(setup + calls, 1), round(setup, 1), long, len(tests) - len(long)))
        lines = [f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept)]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
