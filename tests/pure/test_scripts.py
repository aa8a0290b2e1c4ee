"""Scripts: faults and mutants that can be made, where packages are looked for, state that functions keep."""

import ast
from pathlib import Path

import pytest

from scripts.faults import FAULTS, Fault
from scripts.megatron_state.state import states
from scripts.mutants import PACKAGE, ROOT, Result, Results, drawn, own_tests, packages, recorded
from scripts.pip_settings import arguments


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_tests(fault: Fault):
    ast.parse(fault.applied((ROOT / PACKAGE / fault.path).read_text()))
    files = [word for word in fault.tests.split() if word.endswith(".py")]
    assert files
    assert all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize("package", packages())
def test_every_package_has_tests_of_its_own(package: str):
    files = own_tests(package)
    assert files
    assert all((ROOT / file).exists() for file in files)
    assert "tests/pure/test_plan_check.py" not in files or package == "plan"


def test_more_mutants_are_the_same_ones_and_others_and_another_seed_draws_others():
    few, many = drawn("losses", 5, 0), drawn("losses", 9, 0)
    assert list(many)[:5] == list(few)
    assert list(drawn("losses", 5, 1)) != list(few)
    for mutant in many.values():
        source = (ROOT / mutant.path).read_bytes()
        assert mutant.applied(source) != source


def test_the_share_leaves_out_what_no_test_can_notice():
    results = Results(0, (Result("a", "tests/a.py::test"), Result("b"), Result("c", equivalent="a matter of looks")))
    assert (results.killed, results.counted, results.share) == (1, 2, 0.5)
    for kept in recorded().values():
        assert not any(result.noticed_by and result.equivalent for result in kept.mutants)


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        (["global.index-url='https://a/simple'"], "--index-url https://a/simple"),
        (["global.extra-index-url='file:///b https://c'"], "--extra-index-url file:///b --extra-index-url https://c"),
        (["global.find-links='/all'", "install.find-links='/of-command'"], "--find-links /of-command"),
        (["install.find-links='/of-command'", ":env:.find-links='/of-environment'"], "--find-links /of-environment"),
        (["global.timeout='60'", "download.index-url='https://a/simple'", "global.cert='/c.pem'"], ""),
    ],
)
def test_places_of_packages_become_arguments_of_uv_and_other_settings_are_left_out(listed: list[str], wanted: str):
    assert list(arguments(listed)) == wanted.split()


# ---- state of Megatron's functions; that all is found is seen in its releases: tests/mcore/test_megatron_state.py ----


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
