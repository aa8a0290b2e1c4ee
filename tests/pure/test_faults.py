"""Every fault that `scripts/faults.py` tries can still be made: its place is there once, and what is written is Python."""

import ast

import pytest

from scripts.faults import FAULTS, Fault
from scripts.mutants import PACKAGE, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_its_tests(fault: Fault):
    ast.parse(fault.applied((ROOT / PACKAGE / fault.path).read_text()))
    files = [word for word in fault.tests.split() if word.endswith(".py")]
    assert files
    assert all((ROOT / file).exists() for file in files)
