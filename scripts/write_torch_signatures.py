"""Writes names of the parameters of torch's functions that this package calls, by release, from wheels of torch.

    pip download torch==2.6.0 --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.12 -d WHEELS
    python -m scripts.write_torch_signatures WHEELS/torch-*.whl

Wheels of any system serve, and nothing is installed. Which functions are called is read from our sources, and
`tests/cpu/test_torch_signatures.py` compares the calls with every release. Only identifiers are recorded, as in
`scripts/write_signatures.py`.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.write_signatures import parameters

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_epp"
FILE = ROOT / "tests" / "support" / "runtime" / "torch_signatures.json"
MODULES = {
    "torch._C._distributed_c10d": ("torch/_C/_distributed_c10d.pyi",),
    "torch.autograd": ("torch/autograd/__init__.py",),
    "torch.autograd.graph": ("torch/autograd/graph.py",),
    "torch.backends.cuda": ("torch/backends/cuda/__init__.py",),
    "torch.backends.cudnn": ("torch/backends/cudnn/__init__.py",),
    "torch.cuda": tuple(f"torch/cuda/{name}.py" for name in ("memory", "random", "streams", "__init__")),
    "torch.cuda.nvtx": ("torch/cuda/nvtx.py",),
    "torch.distributed": ("torch/distributed/distributed_c10d.py",),
    "torch.distributed.ProcessGroupNCCL": (),
    "torch.distributed.distributed_c10d": ("torch/distributed/distributed_c10d.py",),
    "torch.distributed.run": ("torch/distributed/run.py",),
    "torch.ops.aten": (),
    "torch.utils._pytree": ("torch/utils/_pytree.py",),
}
"""Modules of torch whose functions are recorded if they are called, and the files that define them."""
_NCCL, _STUBS = "torch.distributed.ProcessGroupNCCL.Options", "torch/_C/_distributed_c10d.pyi"
OPTIONS = {"ProcessGroupNCCL.Options", "ProcessGroupNCCL.NCCLConfig", "Backend.Options"}
"""Classes of options of communicators, whose fields are recorded."""
_ATEN, _OPERATORS = "torch.ops.aten", "torchgen/packaged/ATen/native/native_functions.yaml"


class Call(NamedTuple):
    """A call in a source file.

    Attributes:
        name: of the function, with its module.
        positional: number of arguments without a name.
        keywords: names of the others.
        is_complete: False if it also passes a sequence or a mapping of arguments.
        where: file and line.
    """

    name: str
    positional: int
    keywords: tuple[str, ...]
    is_complete: bool
    where: str


@functools.cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    """Return our source files that name torch, parsed."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return tuple((path, ast.parse(text)) for path, text in texts.items() if "torch" in text)


def calls() -> Iterator[Call]:
    """Yield the calls of functions of `MODULES`, by the names under which a file has imported them."""
    for path, tree in trees():
        imported = dict(_imports(tree))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            head, _, rest = _dotted(node.func).partition(".")
            name = f"{imported.get(head, '')}.{rest}".rstrip(".")
            if name.rpartition(".")[0] in MODULES:
                keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
                starred = sum(isinstance(each, ast.Starred) for each in node.args)
                is_complete = not starred and len(keywords) == len(node.keywords)
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Call(name, len(node.args) - starred, keywords, is_complete, where)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.asname, name.name) if name.asname else (name.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def _called(sources: Iterable[str], name: str) -> list[str] | None:
    """Return the parameters of a function, or with which a class is made; None if no source has it."""
    for source in sources:
        if (names := parameters(source, name)) is not None:
            return names
        for maker in ("__init__", "__new__"):
            if (names := parameters(source, f"{name}.{maker}")) is not None:
                return names[1:]
    return None


def operator(table: str, name: str) -> list[str] | None:
    """Return the parameters of an operator from torch's table of operators; None if it is not in there."""
    match = re.search(rf"^- func: {re.escape(name)}\((.*)\) ->", table, re.MULTILINE)
    if match is None:
        return None
    before, _, behind = match[1].partition("*, ")
    return [
        mark + word.strip().partition("=")[0].split()[-1] + "=" * ("=" in word)
        for mark, part in (("", before), ("*", behind))
        for word in part.split(", ")
        if word.strip()
    ]


def fields(stubs: str) -> list[str]:
    """Return the fields of `OPTIONS`, with their class."""
    names: list[str] = []

    def visit(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and prefix.rstrip(".") in OPTIONS:
                names.append(prefix + node.target.id)
            elif isinstance(node, ast.FunctionDef) and prefix.rstrip(".") in OPTIONS and not node.name.startswith("__"):
                names.append(prefix + node.name)  # a property

    visit(ast.parse(stubs).body, "")
    return sorted(set(names))


def of_release(read: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the parameters of every function that is called, and the fields of options, from one release's files."""
    sources = {module: [read(file) for file in files] for module, files in MODULES.items()}
    table, stubs, names_of = read(_OPERATORS), read(_STUBS), {}
    for name in sorted({call.name for call in calls()} | {_NCCL, "torch.distributed.new_group"}):
        module, _, short = name.rpartition(".")
        if module == _ATEN:
            names = operator(table, short)
        elif name == _NCCL:
            names = _called([stubs], "ProcessGroupNCCL.Options")
        else:
            names = _called(sources[module], short)
        if names is not None:
            names_of[name] = names
    return names_of | {"options": fields(stubs)}


def main(*wheels: str) -> None:
    by_release = {Path(wheel).name.split("-")[1]: wheel for wheel in wheels}
    record: dict[str, list[tuple[list[str], list[str]]]] = {}
    for release in sorted(by_release, key=lambda text: tuple(map(int, text.split(".")))):
        with zipfile.ZipFile(by_release[release]) as archive:
            signatures = of_release(lambda file, archive=archive: archive.read(file).decode())
        for name, names in signatures.items():
            rows = record.setdefault(name, [])
            if rows and rows[-1][1] == names:
                rows[-1][0].append(release)
            else:
                rows.append(([release], names))
    texts = (f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]" for name, rows in sorted(record.items()))
    FILE.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
