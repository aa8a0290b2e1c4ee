"""The lists of files and tests that make up the sets name files and tests that exist."""

from __future__ import annotations

import ast

import pytest

from tests.support import ROOT
from tests.support.fast import FAST, LONG


def named_in(name: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("name", FAST)
def test_what_the_fast_set_leaves_out_is_there_and_is_not_all(name: str):
    assert set(FAST[name]) < named_in(name)


def test_the_files_that_take_long_are_there_once():
    assert all((ROOT / "tests" / name).exists() for name in LONG)
    assert len(set(LONG)) == len(LONG)
