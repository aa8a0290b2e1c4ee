"""The package stays readable: programs, features and tests have at most so many lines.

Limits only fall, but for what a new feature has in its own folder, with its tests and benchmarks.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "megatron_epp"
PROGRAMS = {
    "training": (
        (
            "mcore.entry",
            "mcore.patches.install",
            "mcore.start.sliced_start",
            "mcore.iteration.document_schedule",
            "mcore.training.checkpoints",
        ),
        20_101,
    ),
    "iteration": (("mcore.iteration.document_schedule",), 13_245),
    "planner": (("planner.search", "planner.service.answers"), 11_629),
    "command line": (("tools.cli.main",), 1_921),
}
"""Modules with which a program begins, and the most lines of what they import at their tops, and so on."""
FOLDERS = {"megatron_epp": 61_214, "megatron_epp/contrib": 6_425, "tests": 53_453, "scripts": 11_287}
FEATURES = [f"megatron_epp/features/{path.parent.name}" for path in (PACKAGE / "features").glob("*/__init__.py")]
FOLDERS |= dict.fromkeys(FEATURES, 1_300)


def file_of(module: str) -> Path | None:
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def imported(file: Path) -> frozenset[str]:
    """Modules of the package that a file imports when it is imported, and the packages above them."""
    modules = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron_epp":
            module = str(node.module).removeprefix("megatron_epp").removeprefix(".")
            modules |= {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {
                alias.name.removeprefix("megatron_epp.") for alias in node.names if alias.name.startswith("megatron_epp.")
            }
    return frozenset(above for module in modules for above in packages(module))


def packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def lines_of(files: set[Path]) -> int:
    return sum(file.read_text().count("\n") for file in files)


def closure(modules: tuple[str, ...]) -> set[Path]:
    left, files = [above for module in modules for above in packages(module)], set[Path]()
    while left:
        file = file_of(left.pop())
        if file is not None and file not in files:
            files.add(file)
            left += imported(file)
    return files


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_imports_no_more_lines_than_its_limit(program: str):
    begins, most = PROGRAMS[program]
    assert all(file_of(module) for module in begins)
    lines = lines_of(closure(begins))
    assert lines <= most, f"{lines} lines: move a feature out, or delete one, in the same change"


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_no_more_lines_than_its_limit(folder: str):
    lines = lines_of({*(REPOSITORY / folder).rglob("*.py")})
    assert lines <= FOLDERS[folder], f"{lines} lines: delete as many as were added, in the same change"
