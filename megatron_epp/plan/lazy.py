"""Import of what other packages define, by the name that a table has of it."""

from __future__ import annotations

import importlib
from typing import Any


def load(where: str) -> Any:
    """Import the object that ``module:name`` stands for."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
