"""Flags of Megatron that say which of a model's layers are of a kind."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief


def by_layer(frequency: Any, count: int) -> list[bool]:
    """Read which layers a flag names: every n-th from the first on, or a list as ``([0]*3+[1]*58)``. Raises `EppError`."""
    text = str(frequency).strip()
    if text.isdecimal() and int(text[:9]) >= 1:
        return [layer % int(text) == 0 for layer in range(count)]
    try:
        entries = _listed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise EppError(f"{brief(frequency)} is no list of layers") from None
    return [bool(entry) for entry in islice(cycle(entries or [0]), count)]


def _listed(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left) + _listed(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = ast.literal_eval(node.right)
        if not isinstance(times, int) or not 0 <= times <= 10_000:
            raise ValueError(times)
        return _listed(node.left) * times
    entries = ast.literal_eval(node)
    if not isinstance(entries, list) or not all(type(entry) is int for entry in entries):
        raise ValueError(entries)
    return entries


def pattern_of(flags: Mapping[str, Any]) -> str:
    """Return the pattern of a hybrid model's layers, without stages and multi-token prediction; empty for a GPT."""
    return whole_pattern(flags).partition("/")[0]


def whole_pattern(flags: Mapping[str, Any]) -> str:
    """Return the pattern of a hybrid model's layers, without stages; empty for a GPT."""
    return str(flags.get("hybrid_layer_pattern") or flags.get("hybrid_override_pattern") or "").replace("|", "")


def all_but_every(frequency: Any, count: int) -> list[bool]:
    """Read which layers a flag names: all but the last of every n, or a list as `by_layer` reads it."""
    text = str(frequency).strip()
    if text.isdecimal():
        return [(layer + 1) % max(1, int(text[:9])) != 0 for layer in range(count)]
    return by_layer(frequency, count)
