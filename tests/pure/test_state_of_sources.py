"""State that functions keep is told with who changes it and where, and what is local to a call or an object is left out.

That everything is found is seen in Megatron's own releases: `tests/mcore/test_megatron_state.py`.
"""

from __future__ import annotations

from pathlib import Path

from scripts.megatron_state.state import states

KEPT = """
_COUNT = 0
_QUEUE = []
_SWITCH = False


class Tracker:
    scale = None
    names = []

    def note(self):
        self.names.append("x")

    @classmethod
    def set_scale(cls, value):
        cls.scale = value


class Plain:
    names = []

    def __init__(self):
        self.names = []

    def note(self):
        self.names.append("x")


def count():
    global _COUNT
    _COUNT += 1


def local(_QUEUE):
    _COUNT = 1
    _QUEUE.append(_COUNT)
"""
REACHED = """
from megatron.core import kept as other
from . import kept


def forward(x):
    setattr(kept, "_SWITCH", True)
    other.Tracker.names.append(x)
    made = other.Tracker()
    made.calls = 3
    x.add_(1)
"""


def test_changes_are_told_with_their_functions_and_lines_in_each_release(tmp_path: Path) -> None:
    releases = {"1": KEPT, "2": "\n" + KEPT.replace("_COUNT", "_NUMBER")}
    for release, kept in releases.items():
        folder = tmp_path / release / "megatron" / "core"
        (folder / "inference").mkdir(parents=True)
        (folder / "kept.py").write_text(kept)
        (folder / "reached.py").write_text(REACHED)
        (folder / "inference" / "left_out.py").write_text("_KEPT = []\n\n\ndef keep(x):\n    _KEPT.append(x)\n")
    found = {state.name: state for state in states({name: tmp_path / name for name in releases}, ("core/inference",))}
    assert {name: state.changed_by for name, state in found.items()} == {
        "core.kept:Tracker.names": ("Tracker.note", "forward"),
        "core.kept:Tracker.scale": ("Tracker.set_scale",),
        "core.kept:_COUNT": ("count",),
        "core.kept:_NUMBER": ("count",),
        "core.kept:_SWITCH": ("forward",),
    }
    assert found["core.kept:_COUNT"].lines.keys() == {"1"}
    (first,), (second,) = (found["core.kept:Tracker.scale"].lines[release] for release in releases)
    assert first[0] == second[0] == "core/kept.py"
    assert KEPT.splitlines()[first[1] - 1].strip() == "cls.scale = value"
    assert second[1] == first[1] + 1
