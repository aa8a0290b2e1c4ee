"""Which mutants of a package are drawn, and which tests run on them, follow from the sources alone."""

import pytest

from scripts.mutants import ROOT, Result, Results, drawn, own_tests, packages, recorded


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
