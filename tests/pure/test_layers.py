"""Packages import from packages below them only, and no modules import each other in a circle."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatron_epp

ROOT = Path(megatron_epp.__file__).parent
LAYERS = (
    {"plan"},
    {"cost"},
    {"port"},
    {"features"},
    {"planner"},
    {"losses"},
    {"launch", "data"},
    {"runtime"},
    {"mcore"},
    {"features.*", "tools", "run", "callers"},
    {"contrib", "__main__"},
)
"""From the lowest to the highest. Packages of one layer do not import each other, and none imports `contrib`."""
PURE = ("plan", "cost", "port", "planner", "tools.report", "tools.formulas", "tools.layouts", "tools.advice")
OF_MEGATRON = ("contrib.overlap.exchanges", "contrib.flexsp.group_run", "features.")
"""Beginnings of the names of modules outside `mcore` that import Megatron."""
SPLITS = ("features.split_weights.split_orders", "features.split_weights.split")
SHARDS = ("features.vocabulary.vocabulary_order", "features.vocabulary.shard_insertion")
PURE_FEATURES = ("features.copies", "features.local_search", "features.stages", *SHARDS, *SPLITS)
PURE_CONTRIB = ("contrib.papers", "contrib.exact", "contrib.foreign", "contrib.flexsp.degrees", "contrib.flexsp.group_costs")


def modules() -> dict[str, Path]:
    """Every module by its dotted name below the package; ``plan`` stands for its ``__init__`` file."""
    found = {}
    for path in ROOT.rglob("*.py"):
        *folders, name = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(folders if name == "__init__" else [*folders, name])] = path
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path, known: Mapping[str, object]) -> Iterator[str]:
    """Modules of this package that code imports anywhere: at its top, inside functions, or for type checking."""
    prefix = "megatron_epp."
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            module = str(node.module).removeprefix(prefix)
            whole = (f"{module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else module for name in whole)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix(prefix) for alias in node.names if alias.name.startswith(prefix))


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def upward(edges: Mapping[str, set[str]]) -> list[str]:
    """Imports that do not go down, between packages of `LAYERS`."""
    height = {package: number for number, packages in enumerate(LAYERS) for package in packages}
    found = []
    for name, targets in edges.items():
        for target in targets:
            source, goal = package_of(name), package_of(target)
            if name and source != goal and height[source] <= height[goal]:
                found.append(f"{name} imports {target}")
    return sorted(found)


def package_of(name: str) -> str:
    """Return the package of a module. A feature's folder is not of the package of their table, which the core imports."""
    return "features.*" if name.startswith("features.") else name.partition(".")[0]


def test_every_package_has_its_layer():
    assert {package_of(name) for name in modules()} - {""} == set().union(*LAYERS)


def test_imports_go_down():
    assert upward(graph()) == []
    assert upward({"plan.proof": {"cost"}, "cost": {"plan"}}) == ["plan.proof imports cost"]


def test_no_modules_import_each_other_in_a_circle():
    edges = graph()
    TopologicalSorter(edges).prepare()
    edges["plan.action"].add("plan.lowering")
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()


def rooms(edges: Mapping[str, set[str]], package: str) -> dict[str, set[str]]:
    """Return the imports between the folders and files at the top of a package."""
    found: dict[str, set[str]] = {}
    for name, targets in edges.items():
        inside = [target for target in (name, *targets) if target.startswith(f"{package}.")]
        if name in inside:
            own, *others = (target.split(".")[1] for target in inside)
            found.setdefault(own, set()).update({*others} - {own})
    return found


@pytest.mark.parametrize(("package", "low", "high"), [("planner", "tables", "search"), ("tools", "formulas", "cli")])
def test_the_rooms_of_a_package_import_each_other_in_no_circle(package: str, low: str, high: str):
    edges = rooms(graph(), package)
    assert {low, high} <= edges.keys()
    edges[high].add(low)
    TopologicalSorter(edges).prepare()
    edges[low].add(high)
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()


def test_only_mcore_imports_megatron_and_planning_imports_no_torch():
    for name, path in modules().items():
        package = name.partition(".")[0]
        if package == "mcore" or name.startswith(OF_MEGATRON):
            continue
        is_pure = package in PURE or name.startswith((*(room for room in PURE if "." in room), *PURE_FEATURES, *PURE_CONTRIB))
        heavy = {"torch", "transformer_engine", "megatron"} if is_pure else {"megatron"}
        for node in nodes(path):
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not heavy & {module.partition(".")[0] for module in found}, name


def test_a_training_asks_planner_and_formulas_and_does_not_import_them():
    asked, of_rank = {"planner", "tools"}, {"port", "data", "losses", "runtime", "mcore"}
    targets_of = {name: targets for name, targets in graph().items() if name.partition(".")[0] in of_rank}
    assert [name for name, targets in targets_of.items() if asked & {target.partition(".")[0] for target in targets}] == []


TOLD_APART = {
    "__init__": "the package",
    "gated_delta": "`kinds` has a file for each kind of layers, `runtime` its mathematics",
    "state_space": "the same",
    "layout": "`mcore.arguments` reads the flag of what `plan` defines",
    "plan": "`tools.cli` has a file for each command",
    "prepare": "`tools.cli` has a file for each command",
    "table": "`mcore.arguments` has settings as rows, `contrib.papers` planners",
}
"""Names that files of several folders have, and why the folder suffices to know which is meant."""


def test_a_file_has_a_name_of_its_own():
    count = Counter(path.stem for path in ROOT.rglob("*.py"))
    assert {name for name, number in count.items() if number > 1} == TOLD_APART.keys()


def test_a_public_class_of_core_has_a_name_of_its_own():
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        if not name.startswith("contrib"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
