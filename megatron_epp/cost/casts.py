"""Casts to FP8 by the recipes that keep nothing between microbatches, as Transformer Engine's linear layers make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.plan import EppError, Remedy


@dataclass(frozen=True, slots=True)
class Casts:
    """Rows that a recipe needs, and the bytes of its casts, scales included."""

    # Multiple of rows that a rank's part of a tensor needs. Of recipes with blocks it is a block's length, as Transformer
    # Engine asks where sequence-parallel ranks gather casts: in weight gradients blocks lie along tokens, and with such cuts
    # they are those of the whole sequence.
    rows: int
    # Of a weight by rows and by columns, which stay for an iteration. (On Blackwell one tensorwise copy does.)
    weight_bytes: float
    input_bytes: float  # of a value of a linear layer's input from forward to backward, of which it keeps one of the two


RECIPES = {
    "tensorwise": Casts(rows=16, weight_bytes=2.0, input_bytes=1.0),
    "blockwise": Casts(rows=128, weight_bytes=2 * (1 + 4 / 128**2), input_bytes=1 + 4 / 128),
    "mxfp8": Casts(rows=32, weight_bytes=2 * (1 + 1 / 32), input_bytes=1 + 1 / 32),
}
"""By the names of Megatron's recipes."""


def recipe_of(flags: Mapping[str, Any]) -> str:
    """Return the name of the recipe by which layers multiply, from Megatron's flags; empty without FP8."""
    value = flags.get("fp8_recipe") or "delayed"  # Megatron's default
    return str(getattr(value, "value", value)) if flags.get("fp8") or flags.get("fp8_format") else ""


def casts_of(flags: Mapping[str, Any]) -> Casts | None:
    """Return the casts of a model that Megatron's flags describe; None without FP8. Raises `EppError` for other recipes."""
    name = recipe_of(flags)
    if name and name not in RECIPES:
        names = f"{', '.join([*RECIPES][:-1])} or {[*RECIPES][-1]}"
        raise EppError(f"plans are made for FP8 by {names}, not by {name}", Remedy("change", "fp8_recipe"))
    return RECIPES[name] if name else None
