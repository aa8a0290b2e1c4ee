"""Random cases of which a part runs by default, and all others in the set `slow`."""

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import pytest


def some_by_default(name: str | tuple[str, ...], values: Sequence[Any], by_default: int) -> pytest.MarkDecorator:
    """Parametrize a test: the first `by_default` values run always, the others with ``-m slow`` only.

    With several names a value has one part for each.
    """
    parts = tuple if isinstance(name, tuple) else lambda value: (value,)
    first, others = values[:by_default], values[by_default:]
    return pytest.mark.parametrize(name, [*first, *(pytest.param(*parts(value), marks=pytest.mark.slow) for value in others)])


def spread_by_default(step: int, **choices: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of choices, by default with those whose places add up to a multiple of `step`:
    in these every two choices meet, if a third name has as many as `step`.
    """
    places = product(*(range(len(values)) for values in choices.values()))
    every = list(zip(product(*choices.values()), places, strict=True))
    first, others = ([one for one, at in every if (sum(at) % step == 0) == is_first] for is_first in (True, False))
    return some_by_default(tuple(choices), [*first, *others], len(first))
