"""What is known of the state that Megatron keeps (`known.yaml`), and the page of the documentation that says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from scripts.tables import table, with_tables

DATA = Path(__file__).with_name("known.yaml")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron-state.md"
PLANS = "documents", "microbatches"


def known() -> dict[str, Any]:
    """Return `known.yaml`: `outside`, `reached` and `unreached`."""
    data: dict[str, Any] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return data


def rows_of(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that a name belongs to: those with the name itself, else those with a pattern of it."""
    listed = [(pattern, row) for row in rows for pattern in row.get("names", ())]
    return [row for pattern, row in listed if pattern == name] or [row for pattern, row in listed if fnmatchcase(name, pattern)]


def verdict(row: Mapping[str, Any], plans: str) -> tuple[str, str]:
    """Return what becomes of a state with a kind of plans, and the test, the flags or the reason."""
    ((what, why),) = (row.get(plans) or row["both"]).items()
    return what, why


def said(row: Mapping[str, Any], plans: str) -> str:
    """Return the verdict in words."""
    what, why = verdict(row, plans)
    if what == "honoured":
        return what
    if what == "refused":
        return "refused: " + ", ".join(f"`{flag}`" for flag in flags(why))
    return f"{what}: {why}"


def flags(text: str) -> list[str]:
    """Return flags, each with its values."""
    return re.split(r" (?=--)", text)


def page() -> str:
    """Return the page with its table as it is now, without what is harmless to both kinds of plans."""
    states = ((row["keeps"], *_columns(row)) for row in known()["reached"] if "harmless" not in row.get("both", ()))
    titles = "state", "plans of documents", "a script's own microbatches, if other"
    return with_tables(PAGE.read_text(encoding="utf-8"), [table(titles, states)])


def _columns(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is said of both kinds of plans; nothing of the second where it is the same."""
    first, second = (said(row, plans) for plans in PLANS)
    return first, "" if first == second else second
