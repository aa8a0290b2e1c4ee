"""State that functions keep is found in sources, whichever way they reach it, and what is local to a call is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.megatron_state.state import State, states

TREE = {
    "core/__init__.py": "",
    "core/kept.py": """
from functools import lru_cache

_COUNT = 0
_QUEUE, _TABLE = [], {}
_READ = [1]
_SWITCH = False


class Tracker:
    sums = {}
    scale = None
    names = []

    def __init__(self):
        self.calls = 0

    def note(self):
        self.calls += 1
        self.names.append("x")

    @classmethod
    def set_scale(cls, value):
        cls.scale = value

    class Inner:
        last = None


_TRACKER = Tracker()


class Plain:
    names = []

    def __init__(self):
        self.names = []

    def note(self):
        self.names.append("x")


def count():
    global _COUNT, _MADE_LATE
    _COUNT += 1
    _MADE_LATE = _READ[0]
    Tracker.Inner.last = _COUNT


def table():
    return _TABLE


def local(_QUEUE):
    _COUNT = 1
    _QUEUE.append(_COUNT)
    count_ = list(_READ)
    count_.append(2)
    return count_


def warned():
    warned.once = True


@lru_cache(maxsize=8)
def angles(length):
    return list(range(length))
""",
    "core/reached.py": """
from megatron.core import kept as other
from . import kept
from .kept import Tracker, table, _QUEUE


def forward(x):
    from megatron.core.kept import _TABLE

    sums = table()
    again = sums
    again["x"] = x
    Tracker.sums["x"] = x
    _QUEUE.append(x)
    setattr(kept, "_SWITCH", True)
    other.Tracker.names.append(x)
    made = Tracker()
    made.calls = 3
    x.add_(1)
""",
    "core/transformer/layer.py": """
class Layer:
    def __init__(self):
        self.seen, self.last, self.longest = [], None, 0
        self.seen.append(0)

    def forward(self, x):
        self.last = x
        self.seen.append(x)
        self.longest = max(self.longest, len(x))
        self.total.add_(x)
""",
    "core/inference/left_out.py": "_KEPT = []\n\n\ndef keep(x):\n    _KEPT.append(x)\n",
}
FOUND = {
    "core.kept:Tracker.Inner.last": "count",
    "core.kept:Tracker.names": "Tracker.note",
    "core.kept:Tracker.scale": "Tracker.set_scale",
    "core.kept:Tracker.sums": "forward",
    "core.kept:_COUNT": "count",
    "core.kept:_MADE_LATE": "count",
    "core.kept:_QUEUE": "forward",
    "core.kept:_SWITCH": "forward",
    "core.kept:_TABLE": "forward",
    "core.kept:_TRACKER": "methods of Tracker",
    "core.kept:angles": "its cache",
    "core.kept:warned.once": "warned",
    "core.transformer.layer:Layer.longest": "Layer.forward",
    "core.transformer.layer:Layer.seen": "Layer.forward",
    "core.transformer.layer:Layer.total": "Layer.forward",
}


def write(folder: Path, changes: dict[str, str] | None = None) -> Path:
    for name, text in (TREE | (changes or {})).items():
        path = folder / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def found(tmp_path: Path) -> dict[str, State]:
    newer = {"core/kept.py": "\n" + TREE["core/kept.py"].replace("_COUNT", "_NUMBER")}
    trees = {"1": write(tmp_path / "1"), "2": write(tmp_path / "2", newer)}
    return {state.name: state for state in states(trees, ("core/inference",))}


def test_everything_that_functions_keep_is_found_and_nothing_else(found: dict[str, State]) -> None:
    assert {name: by for name, by in FOUND.items() if name not in found or by not in found[name].changed_by} == {}
    assert found.keys() - FOUND == {"core.kept:_NUMBER"}


def test_lines_are_those_of_each_release_that_has_it(found: dict[str, State]) -> None:
    assert found["core.kept:_COUNT"].lines.keys() == {"1"}
    assert found["core.kept:_NUMBER"].lines.keys() == {"2"}
    (first,), (second,) = (found["core.kept:Tracker.scale"].lines[release] for release in ("1", "2"))
    assert first[0] == second[0] == "core/kept.py"
    assert second[1] == first[1] + 1
    assert TREE["core/kept.py"].splitlines()[first[1] - 1].strip() == "cls.scale = value"
    assert found["core.kept:Tracker.names"].changed_by == ("Tracker.note", "forward")
