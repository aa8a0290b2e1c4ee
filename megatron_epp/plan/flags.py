"""Settings as flags of a command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_epp.plan.errors import EppError

REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Parallel sizes whose product is the number of ranks of one data-parallel replica."""


def flag_of(name: str) -> str:
    """Return the flag of a setting: two hyphens, and its name with hyphens."""
    return f"--{name.replace('_', '-')}"


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line. True is a flag by itself; False and None are omitted."""
    words: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        words.append(flag_of(name))
        if value is not True:
            words.extend(map(str, value if isinstance(value, list) else [value]))
    return words


def world_of(megatron: Mapping[str, Any]) -> int:
    """Number of ranks of one data-parallel replica. Raises EppError for a size below 1."""
    sizes = {name: 1 if megatron.get(name) is None else megatron[name] for name in REPLICA_SIZES}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise EppError(f"{flag_of(name)} is {size!r}; it must be a whole number from 1")
    return math.prod(sizes.values())
