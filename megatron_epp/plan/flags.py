"""Settings as flags of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
"""Value of a setting that is chosen by what a run is like."""
FLASH_2, CUDNN, FLASH_3 = KERNELS = ("flash-attention-2", "cudnn", "flash-attention-3")
"""Kernels of attention whose rates are published."""
ALLTOALL, DISPATCHERS = "alltoall", ("alltoall", "deepep", "hybridep")
"""How tokens reach their experts: a copy for each, or, with the others, one for all experts of a node, and of a rank."""
MACHINES = ("h100", "cpu")
"""Machines whose rates formulas know."""
GATED_DELTA_NET = "gated_delta_net"
"""Value of `experimental_attention_variant` of a model whose layers are not all of attention."""


def flag_of(name: str) -> str:
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
