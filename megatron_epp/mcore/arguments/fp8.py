"""FP8 by recipes that keep nothing between microbatches: the rows that its products need, and what does not go with plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_epp.mcore.arguments.conflicts import Door

ROWS = {"tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""Recipes whose scales are of the tensor at hand, each with the multiple of rows that a rank's part of a tensor needs.

Of the two with blocks it is a block's length, as Transformer Engine asks where sequence-parallel ranks gather casts. In weight
gradients blocks lie along tokens: with cuts at such multiples they are those of the whole sequence.
"""


def recipe(settings: object) -> str:
    """Return the name of the recipe by which layers multiply, from flags or a model's configuration; empty without FP8."""
    value: Any = getattr(settings, "fp8_recipe", None) or "delayed"  # Megatron's default
    return str(getattr(value, "value", value)) if getattr(settings, "fp8", None) else ""


def row_multiple(settings: object) -> int:
    """Return the multiple of rows that products need on every rank; 1 without FP8."""
    return ROWS.get(recipe(settings), 1)


def problems(settings: object, door: Door) -> Iterator[str]:
    """Yield a recipe whose scales depend on what ran before."""
    name = recipe(settings)
    if name and name not in ROWS:
        histories = "its amax histories advance with every chunk, and plans choose their order and number"
        reason = histories if name == "delayed" else "what it keeps between chunks is unknown"
        yield f"{door.cannot} {door.with_value('fp8_recipe', name)} ({reason}): use tensorwise, blockwise or mxfp8"
