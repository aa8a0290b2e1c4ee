"""FP8 by recipes that keep nothing between microbatches: the rows that its products need, and what does not go with plans."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.cost.casts import RECIPES, recipe_of
from megatron_epp.mcore.arguments.rule import Door


def recipe(settings: object) -> str:
    """Return the name of the recipe by which layers multiply, from flags or a model's configuration; empty without FP8."""
    return recipe_of({name: getattr(settings, name, None) for name in ("fp8", "fp8_recipe")})


def row_multiple(settings: object) -> int:
    """Return the multiple of rows that products need on every rank; 1 without FP8."""
    casts = RECIPES.get(recipe(settings))
    return 1 if casts is None else casts.rows


def problems(settings: object, door: Door) -> Iterator[str]:
    """Yield a recipe whose scales depend on what ran before."""
    name = recipe(settings)
    if name and name not in RECIPES:
        histories = "its amax histories advance with every chunk, and plans choose their order and number"
        reason = histories if name == "delayed" else "what it keeps between chunks is unknown"
        yield f"{door.cannot} {door.with_value('fp8_recipe', name)} ({reason}): use tensorwise, blockwise or mxfp8"
