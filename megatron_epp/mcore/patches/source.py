"""Parsed source code of functions, and fingerprints that do not depend on comments, docstrings and formatting."""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

Definition = ast.FunctionDef | ast.AsyncFunctionDef

_SILENT = ("ctx", "kind", "type_comment")
"""Fields of syntax nodes that follow from the others or have no effect."""


def digest(text: str) -> str:
    """Return twelve hex digits of the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(node: ast.AST) -> str:
    """Return the digest of a definition's syntax tree without docstrings, the same for Python 3.12 to 3.14."""
    return digest(_written(node))


def definition(function: FunctionType) -> Definition | None:
    """Return the definition that a function was compiled from; None if there is no source, and for a lambda."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    return _definitions(text).get((code.co_name, code.co_firstlineno))


def global_names(code: CodeType) -> list[str]:
    """Return the names that a function's code, and the functions inside it, look up in its module, in order and once each."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names += global_names(inner)
    return list(dict.fromkeys(names))


def attribute_chains(node: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield every chain ``name.attribute.attribute`` in a tree as a tuple that starts with the name."""
    for found in ast.walk(node):
        path: list[str] = []
        step: ast.AST = found
        while isinstance(step, ast.Attribute):
            path.insert(0, step.attr)
            step = step.value
        if path and isinstance(step, ast.Name):
            yield (step.id, *path)


@functools.lru_cache(maxsize=16)
def _definitions(text: str) -> dict[tuple[str, int], Definition]:
    """Return the definitions in a file by name and first line, which is that of the first decorator."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found = (node for node in ast.walk(tree) if isinstance(node, Definition))
    return {(node.name, min(part.lineno for part in (node, *node.decorator_list))): node for node in found}


def _written(value: Any) -> str:
    """Write a syntax tree as text. The output of `ast.dump` and `ast.unparse` differs between releases of Python."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if not isinstance(value, ast.AST):
        return f"{type(value).__name__} {value!a}"
    fields = dict(ast.iter_fields(value))
    if isinstance(value, ast.Constant):  # whose None is a value
        return f"({_written(fields['value'])})"
    if isinstance(value, Definition | ast.ClassDef) and ast.get_docstring(value, clean=False) is not None:
        fields["body"] = fields["body"][1:]
    if isinstance(value, ast.JoinedStr):  # early releases of Python 3.12 end a format with an empty text
        fields["values"] = [part for part in value.values if not (isinstance(part, ast.Constant) and part.value == "")]
    kept = [f"{name}={_written(part)}" for name, part in fields.items() if name not in _SILENT and part not in (None, [])]
    return f"{type(value).__name__}({','.join(kept)})"
