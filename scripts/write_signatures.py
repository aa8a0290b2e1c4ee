"""Writes names of the parameters of functions that this package calls, by release of their library.

    python -m scripts.write_signatures transformer-engine=CLONE flash-attn=CLONE deep-ep=CLONE hybrid-ep=CLONE mamba-ssm=CLONE
    pip download torch==2.6.0 --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.12 -d WHEELS
    python -m scripts.write_signatures WHEELS/torch-*.whl

Libraries of kernels are read from clones of them; those of which no clone is named stay as they are; that of `hybrid-ep` is of
DeepEP's branch of this name. Functions of torch are those that our sources call, and are read from wheels of any system.
Nothing is installed. Tests compare our calls with every release (`tests/cpu/test_library_signatures.py`), and those that
Megatron makes of a stand-in. Only identifiers are recorded: each function's parameters in order, with ``=`` behind those that
have a default and ``*`` in front of those given by name alone.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_epp"
FILE = ROOT / "tests" / "support" / "runtime" / "signatures.json"
TORCH_FILE = FILE.with_name("torch_signatures.json")
_FUSED = "transformer_engine/pytorch/cpp_extensions/fused_attn.py"
_COMMON = "transformer_engine/pytorch/module/_common.py"
_FLASH = "flash_attn/flash_attn_interface.py"
_HOPPER = "hopper/flash_attn_interface.py"
_DEEP = "deep_ep/buffer.py deep_ep/buffers/legacy.py"
_HYBRID = "deep_ep/hybrid_ep_buffer.py"
_MAMBA = "mamba_ssm/ops/triton/ssd_combined.py"
FUNCTIONS = {
    "transformer-engine": {
        "fused_attn_fwd": _FUSED,
        "fused_attn_bwd": _FUSED,
        "WeightGradStore.put": _COMMON,
        "WeightGradStore.pop": _COMMON,
        "WeightGradStore.delay_wgrad_compute": _COMMON,
    },
    "flash-attn": {"_flash_attn_varlen_forward": _FLASH, "_flash_attn_varlen_backward": _FLASH},
    "flash-attn-3": {"_flash_attn_forward": _HOPPER, "_flash_attn_backward": _HOPPER},
    "deep-ep": {f"Buffer.{name}": _DEEP for name in ("__init__", "get_dispatch_layout", "dispatch", "combine")},
    "hybrid-ep": {
        f"HybridEPBuffer.{name}": _HYBRID for name in ("__init__", "dispatch_with_permute", "combine_with_unpermute")
    },
    "mamba-ssm": {"mamba_split_conv1d_scan_combined": _MAMBA},
}
"""Functions and methods by library, each with the files where releases have it."""
_CLONE = {"flash-attn-3": "flash-attn"}
"""Clone of a library that has none of its own."""
_LEAST = {
    "transformer-engine": (2, 0),
    "flash-attn": (2, 6),
    "flash-attn-3": (2, 7),
    "deep-ep": (1, 2),
    "hybrid-ep": (1, 2),
    "mamba-ssm": (2, 0),
}
"""Oldest release that is recorded."""
_RELEASE = re.compile(r"v(\d+(?:\.\d+)+)")


def releases(clone: Path, least: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    """Yield releases with the commits of their tags, oldest first, and the newest commit as ``main``."""
    tags = [release for tag in _git(clone, "tag").split() if (release := _RELEASE.fullmatch(tag))]
    numbers = {tag[0]: tuple(map(int, tag[1].split("."))) for tag in tags}
    yield from ((tag.removeprefix("v"), tag) for tag in sorted(numbers, key=numbers.__getitem__) if numbers[tag] >= least)
    yield "main", "HEAD"


def parameters(source: str, name: str) -> list[str] | None:
    """Return the parameters of a function, or of a method of a class, in a source; None if it has no such function."""
    *classes, name = name.split(".")
    body = ast.parse(source).body
    for class_name in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == class_name), [])
    function = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None:
        return None
    named = [*function.args.posonlyargs, *function.args.args]
    first_default = len(named) - len(function.args.defaults)
    own = [argument.arg + "=" * (number >= first_default) for number, argument in enumerate(named)]
    only = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return own + [f"*{argument.arg}" + "=" * (default is not None) for argument, default in only]


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


def released(signatures: Iterable[tuple[str, list[str] | None]]) -> list[tuple[list[str], list[str]]]:
    """Return pairs of consecutive releases with the same parameters, and these, from those of each release."""
    rows: list[tuple[list[str], list[str]]] = []
    for release, names in signatures:
        if names is None:
            continue
        if rows and rows[-1][1] == names:
            rows[-1][0].append(release)
        else:
            rows.append(([release], names))
    return rows


def of_clone(clone: Path, paths: str, name: str, least: tuple[int, ...]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the parameters of a function in every release of a clone, None where it is not in the files."""
    for release, commit in releases(clone, least):
        source = next(filter(None, (_git(clone, "show", f"{commit}:{path}") for path in paths.split())), "")
        yield release, parameters(source, name) if source else None


def _git(clone: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", clone, *command], capture_output=True, text=True, check=False).stdout


def write(path: Path, rows: object, depth: int) -> None:
    """Write JSON with a line for each element at a depth."""

    def text(value: object, level: int) -> str:
        if level == depth or not isinstance(value, (dict, list)):
            return json.dumps(value)
        indent = "\n" + " " * (level + 1)
        parts = [f"{json.dumps(key)}: {text(of, level + 1)}" for key, of in value.items()] if isinstance(value, dict) else None
        opening, closing = "{}" if parts is not None else "[]"
        inside = f",{indent}".join([text(of, level + 1) for of in value] if parts is None else parts)
        return f"{opening}{indent}{inside}{indent[:-1]}{closing}"

    path.write_text(text(rows, 0) + "\n", encoding="utf-8")


def write_libraries(clones: dict[str, Path]) -> None:
    rows = json.loads(FILE.read_text(encoding="utf-8")) | {
        library: {name: released(of_clone(clones[clone], paths, name, _LEAST[library])) for name, paths in functions.items()}
        for library, functions in FUNCTIONS.items()
        if (clone := _CLONE.get(library, library)) in clones
    }
    write(FILE, rows, 3)


def write_torch(wheels: Iterable[str]) -> None:
    by_release = {Path(wheel).name.split("-")[1]: wheel for wheel in wheels}
    signatures: dict[str, dict[str, list[str]]] = {}
    for release in sorted(by_release, key=lambda text: tuple(map(int, text.split(".")))):
        with zipfile.ZipFile(by_release[release]) as archive:
            signatures[release] = of_release(lambda file, archive=archive: archive.read(file).decode())
    names = sorted({name for of in signatures.values() for name in of})
    write(TORCH_FILE, {name: released((release, of.get(name)) for release, of in signatures.items()) for name in names}, 2)


def main(*words: str) -> None:
    if clones := dict(word.split("=", 1) for word in words if "=" in word):
        write_libraries({library: Path(clone) for library, clone in clones.items()})
    if wheels := [word for word in words if word.endswith(".whl")]:
        write_torch(wheels)


if __name__ == "__main__":
    main(*sys.argv[1:])
