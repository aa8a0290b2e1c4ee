"""A feature is a folder and a row: its functions exist, its gain is said, and the core does not know it."""

import ast
import re
from importlib.util import find_spec

import pytest

from megatron_epp.features import FEATURES, Feature
from tests.pure.test_layers import ROOT, modules

KINDS = (
    "adopt",
    "built",
    "head",
    "run",
    "orders",
    "candidates",
    "search",
    "fit",
    "split",
    "finish",
    "choice",
    "divisible",
    "work",
    "layouts",
)
TARGETS = [(feature, target) for feature in FEATURES for target in map(feature.__getattribute__, KINDS) if target]


@pytest.mark.parametrize(("feature", "target"), TARGETS, ids=[target.rpartition(".")[2] for _, target in TARGETS])
def test_a_row_names_functions_and_classes_that_exist(feature: Feature, target: str):
    module, _, function = target.removeprefix("megatron_epp.").partition(":")
    tree = ast.parse(modules()[module].read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_folder_has_a_row_and_every_row_says_what_it_gains():
    folders = {path.name for path in (ROOT / "features").iterdir() if (path / "__init__.py").exists()}
    assert folders == {target.split(".")[2] for _, target in TARGETS if "contrib" not in target}
    for feature in FEATURES:
        assert re.search(r"\d|models", feature.gain), f"{feature.name}: no figure, no feature"
        for module in re.findall(r"python -m ([\w.]+)", feature.gain):
            assert find_spec(module), f"{feature.name}: its figure is of {module}, which does not exist"


def test_the_walk_through_an_iteration_names_what_exists():
    named = re.findall(r"`([\w/]+\.py):(\w+)`", (ROOT.parent / "docs" / "one-iteration.md").read_text())
    assert len(named) > 20
    assert [name for file, name in named if not re.search(rf"^(class|def) {name}\b", (ROOT / file).read_text(), re.M)] == []
