"""What is known of the state that Megatron keeps (`known.yaml`), and the page of the documentation that says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).with_name("known.yaml")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron-state.md"
PLANS = "documents", "microbatches"
_HEAD = """\
<!-- Written by `python -m scripts.megatron_state --write` from scripts/megatron_state/known.yaml: change that, run again. -->

# State that Megatron keeps

Megatron keeps counters, scales, queues and buffers in variables of modules and in attributes of classes and layers. Plans run
microbatches and slices in another order than the caller's, backwards in another order than forwards, and some layers twice.
Where recompute adds to a counter again, or a queue takes the order of running for the order of the data, numbers would be wrong
without an error. This page has all such state of megatron-core 0.18 and 0.19:

- *honoured*: its values, and what follows from them, are those of Megatron's own schedule; the file has the test;
- *refused*: with these flags a run ends before it begins, and is told which;
- *harmless*: neither order nor repetition changes a number, for the reason given.

`python -m scripts.megatron_state FOLDER...` lists it from the sources of releases, with lines and functions, and with `--new`
only what this page lacks; a test does the same for three releases. Attributes that a forward of a layer binds anew for itself
are not on the list.

"""
_UNREACHED = """
## Changed outside of forwards and backwards

"""
_OUTSIDE = """
## Not looked at

"""


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
        return f"honoured: `{why.partition('::')[0]}`"
    if what == "refused":
        return "refused: " + ", ".join(f"`{flag}`" for flag in flags(why))
    return f"{what}: {why}"


def flags(text: str) -> list[str]:
    """Return flags, each with its values."""
    return re.split(r" (?=--)", text)


def page() -> str:
    """Return the whole page."""
    data = known()
    reached = [(row["keeps"], _names(row), *_columns(row)) for row in data["reached"]]
    unreached = [(row["changed"], _names(row)) for row in data["unreached"]]
    outside = [(f"`{name}`", reason) for name, reason in data["outside"].items()]
    names = "names, behind `megatron.`"
    parts = (
        _HEAD,
        table(reached, ("what it keeps", names, "plans of documents", "a script's own microbatches")),
        _UNREACHED,
        table(unreached, ("changed", names)),
        _OUTSIDE,
        table(outside, ("in `megatron/`", "what it is for")),
    )
    return "".join(parts)


def _columns(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is said of both kinds of plans, once where it is the same."""
    first, second = (said(row, plans) for plans in PLANS)
    return first, "the same" if first == second else second


def _names(row: Mapping[str, Any]) -> str:
    """Return the names of a row, each module once."""
    by_module: dict[str, list[str]] = {}
    for name in (*row.get("names", ()), *row.get("unseen", ())):
        module, _, inside = name.partition(":")
        by_module.setdefault(module, []).append(f"`{inside}`")
    return "; ".join(f"`{module}`: {', '.join(inside)}" for module, inside in by_module.items())


def table(rows: Iterable[Sequence[str]], titles: Sequence[str]) -> str:
    """Return rows as a table in Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *rows))
