"""Scripts: faults and mutants that can be made, and where packages are looked for."""

import ast

import pytest

from scripts.faults import FAULTS, Fault
from scripts.mutants import PACKAGE, ROOT, drawn, own_tests, packages
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
