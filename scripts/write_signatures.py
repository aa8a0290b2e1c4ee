"""Writes names of the parameters of functions that kernels call, by release of their library, from clones of the libraries.

    python scripts/write_signatures.py transformer-engine=CLONE flash-attn=CLONE deep-ep=CLONE hybrid-ep=CLONE mamba-ssm=CLONE

Libraries of which no clone is named stay as they are; that of `hybrid-ep` is of DeepEP's branch of this name. Tests compare our
calls with them (`tests/cpu/test_library_signatures.py`), and those that Megatron makes of a stand-in. Only identifiers are
recorded: each function's parameters in order, with ``=`` behind those that have a default and ``*`` in front of those given by
name alone.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parents[1] / "tests" / "support" / "runtime" / "signatures.json"
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


def recorded(clone: Path, functions: dict[str, str], least: tuple[int, ...]) -> dict[str, list[list[object]]]:
    """Return, for each function, pairs of consecutive releases with the same parameters, and these."""
    signatures: dict[str, list[list[object]]] = {name: [] for name in functions}
    for release, commit in releases(clone, least):
        for name, paths in functions.items():
            source = next(filter(None, (_git(clone, "show", f"{commit}:{path}") for path in paths.split())), "")
            names = parameters(source, name) if source else None
            if names is None:
                continue
            if signatures[name] and signatures[name][-1][1] == names:
                signatures[name][-1][0].append(release)  # type: ignore[attr-defined]
            else:
                signatures[name].append([[release], names])
    return signatures


def _git(clone: Path, *command: str) -> str:
    return subprocess.run(["git", "-C", clone, *command], capture_output=True, text=True, check=False).stdout


def main(*words: str) -> None:
    clones = dict(word.split("=", 1) for word in words)
    rows = json.loads(FILE.read_text(encoding="utf-8")) | {
        library: recorded(Path(clones[clone]), functions, _LEAST[library])
        for library, functions in FUNCTIONS.items()
        if (clone := _CLONE.get(library, library)) in clones
    }
    texts = {
        library: {name: ",\n   ".join(map(json.dumps, row)) for name, row in functions.items()}
        for library, functions in rows.items()
    }
    parts = (
        f' "{library}": {{\n' + ",\n".join(f'  "{name}": [\n   {text}\n  ]' for name, text in functions.items()) + "\n }"
        for library, functions in texts.items()
    )
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
