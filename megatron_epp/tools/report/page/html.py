"""A page of plans and runs: one file with its style, scripts and data, which needs no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.measured import FAR_WITH_ZOOM, far_from
from megatron_epp.plan.writing import write_text
from megatron_epp.tools.report.page.data import Shown, operation_columns, plan_columns
from megatron_epp.tools.report.text import batch_text

SCRIPTS = ("model.js", "text.js", "state.js", "lanes.js", "memory.js", "table.js", "pane.js", "main.js")
"""Scripts in the order in which they run, in one scope."""


def page(shown: Sequence[Shown]) -> str:
    """Return plans below each other on one time axis, as HTML. Raises `PlanError` as `plan_columns` does, and for none."""
    if not shown:
        raise PlanError("there is no plan to draw: no planner found one")
    batches = list(dict.fromkeys(batch_text(each.plan) for each in shown))
    title = batches[0] if len(batches) == 1 else f"{len(batches)} batches"
    data = {
        "title": title,
        "operations": operation_columns(),
        "equal_widths": any(each.measured is not None and far_from(each.plan, each.measured, FAR_WITH_ZOOM) for each in shown),
        "plans": list(map(plan_columns, shown)),
    }
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "data": embedded(data),
        "scripts": "\n".join(map(_asset, SCRIPTS)),
    }
    frame = _asset("page.html")
    for name, text in parts.items():
        frame = frame.replace(f"<!--{name}-->", text, 1)
    return frame


def save_page(shown: Sequence[Shown], path: str | Path) -> None:
    write_text(path, page(shown))


def embedded(data: object) -> str:
    """Format data as JSON that can stand in a `script` element: texts in it cannot end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
