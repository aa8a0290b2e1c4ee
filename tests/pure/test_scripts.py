"""Scripts: faults and mutants that can be made, where packages are looked for."""

import ast

import pytest

from scripts.faults import FAULTS, Fault
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


def test_each_place_becomes_an_argument_of_uv():
    listed = ["global.index-url='https://a/simple'", "global.extra-index-url='file:///b/simple https://c/simple'"]
    assert list(arguments(listed)) == [
        *("--index-url", "https://a/simple"),
        *("--extra-index-url", "file:///b/simple"),
        *("--extra-index-url", "https://c/simple"),
    ]


def test_the_environment_goes_before_the_command_and_the_command_before_all():
    listed = ["global.find-links='/all'", "install.find-links='/command'"]
    assert list(arguments(listed)) == ["--find-links", "/command"]
    assert list(arguments([*listed, ":env:.find-links='/environment'"])) == ["--find-links", "/environment"]


def test_other_settings_and_commands_are_left_out():
    assert list(arguments(["global.timeout='60'", "download.index-url='https://a/simple'", "global.cert='/c.pem'"])) == []
