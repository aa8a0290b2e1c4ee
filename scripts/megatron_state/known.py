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

Numbers of a training depend on counters, scales, queues and buffers that Megatron keeps in modules, classes and layers. This
page says what plans do about each in megatron-core 0.18 and 0.19. Plans run microbatches and slices in another order than the
caller's, and some layers twice. Without an error a counter would be added to again, or a queue take the order of running for
the order of the data. State is

- *honoured*: its values, and what follows from them, are those of Megatron's own schedule; the file has the test;
- *refused*: with these flags a run ends before it begins; or
- *harmless*: neither order nor repetition changes a number.

`scripts/megatron_state/known.yaml` has the names. `python -m scripts.megatron_state FOLDER...` finds them in the sources of
releases, with lines and functions, and with `--new` those that the file lacks; a test does so for three releases. Attributes
that a forward of a layer binds anew for itself are not listed.

"""
_HARMLESS = """
## Harmless to both

"""
_ELSEWHERE = """
## Not on the list

State that is changed {changed}.

Parts of `megatron/` that no forward or backward of a training runs: {outside}.
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
    states = [(row["keeps"], *_columns(row)) for row in data["reached"]]
    harmless = [(keeps, both.removeprefix("harmless: ")) for keeps, both, same in states if not same and "harmless" in both]
    others = [row for row in states if row[0] not in dict(harmless)]
    changed = "; ".join(row["changed"] for row in data["unreached"])
    outside = ", ".join(f"`{name}`" for name in data["outside"])
    parts = (
        _HEAD,
        table(others, ("what Megatron keeps", "plans of documents", "a script's own microbatches, if other")),
        _HARMLESS,
        table(harmless, ("what Megatron keeps", "why it changes no number")),
        _ELSEWHERE.format(changed=changed, outside=outside),
    )
    return "".join(parts)


def _columns(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is said of both kinds of plans; nothing of the second where it is the same."""
    first, second = (said(row, plans) for plans in PLANS)
    return first, "" if first == second else second


def table(rows: Iterable[Sequence[str]], titles: Sequence[str]) -> str:
    """Return rows as a table in Markdown."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *rows))
