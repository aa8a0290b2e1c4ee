"""Random cases of which a part runs by default, and all others in the set `slow`."""

from collections.abc import Sequence
from typing import Any

import pytest


def some_by_default(name: str | tuple[str, ...], values: Sequence[Any], by_default: int) -> pytest.MarkDecorator:
    """Parametrize a test: the first `by_default` values run always, the others with ``-m slow`` only.

    With several names a value has one part for each.
    """
    parts = tuple if isinstance(name, tuple) else lambda value: (value,)
    first, others = values[:by_default], values[by_default:]
    return pytest.mark.parametrize(name, [*first, *(pytest.param(*parts(value), marks=pytest.mark.slow) for value in others)])
