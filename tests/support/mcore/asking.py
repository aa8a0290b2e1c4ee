"""The planning process of tests without one: what it is asked for runs here."""

from pkgutil import resolve_name
from typing import Any


def ask_here(name: str, *args: Any) -> Any:
    return resolve_name(name)(*args)
