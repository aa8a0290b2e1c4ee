"""Plan files: lossless JSON, one step per line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from pkgutil import resolve_name
from typing import Any

from megatron_epp.plan.codec import hints_of
from megatron_epp.plan.document import CODEC, digest_of, document_of, dumps
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.plan import EXTENSIONS, SCHEMA, VERSION, VERSION_WITH_BORROWED, Plan
from megatron_epp.plan.reading import brief, infinite_at, naming_file, parse_json, read_text, whole
from megatron_epp.plan.writing import write_text

_ON_ONE_LINE = frozenset(
    ("lengths", "num_layers", "placement", "host_links", "static_bytes", "cap_bytes", "host_cap_bytes", "notes")
)


def to_json(plan: Plan) -> str:
    """Return JSON of schema ``megatron-epp/plan``, version 3, or 4 where sequences share prefixes.

    Raises `PlanError` if a number is infinite or NaN.
    """
    document = document_of(plan)
    head = {"schema": document["schema"], "version": document["version"], "digest": digest_of(document)}
    fields = ",\n".join(f"  {json.dumps(name)}: {_value(name, value)}" for name, value in (head | document).items())
    return "{\n" + fields + "\n}\n"


_NO_PLAN = "not a plan, as `megatron-epp plan -o` and training write them"


def from_json(text: str) -> Plan:
    """Read what `to_json` wrote. Unknown fields are ignored, but count towards the digest.

    Raises `PlanError` for another schema or version, a missing or malformed field, or a digest that does not match.
    """
    try:
        document = parse_json(text, "it")
    except EppError as error:
        raise PlanError(f"{_NO_PLAN}: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise PlanError(f"{_NO_PLAN}: schema is {brief(schema)}, expected {SCHEMA!r}")
    version = document.get("version")
    if version not in (known := (VERSION, VERSION_WITH_BORROWED)):
        only = " and ".join(map(str, known))
        raise PlanError(f"plan version {brief(version)} cannot be read, only {only}; plan again with `megatron-epp plan`")
    claimed = document.pop("digest", None)
    try:
        actual = digest_of(document)
    except PlanError as error:
        raise PlanError(f"{error}{infinite_at(text)}") from None
    if claimed != actual:
        raise PlanError(f"plan digest {brief(claimed)} does not match its content ({actual!r}): edited or damaged; plan again")
    return _plan(document)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file, whole or not at all. Raises `PlanError`, which names the file."""
    try:
        write_text(path, to_json(plan))
    except OSError as error:
        raise PlanError(f"cannot write the plan to {path}: {error.strerror}") from error


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises `PlanError`, which names the file."""
    with naming_file(path, PlanError):
        return from_json(read_text(path))


def _value(name: str, value: Any) -> str:
    """Format a field's value: steps and rows one per line, short lists and scalars on the field's own line."""
    if name in ("ranks", "copies"):
        rows = ["    [" + ",".join("\n      " + dumps(step) for step in row) + "]" for row in value]
    elif isinstance(value, list) and name not in _ON_ONE_LINE:
        rows = ["    " + dumps(row) for row in value]
    elif name == "messages":
        parts = []
        for key, table in value.items():
            if key in ("num_bytes", "collective_us", "message_us"):
                parts.append(f"    {dumps(key)}: {dumps(table)}")
            else:
                parts.append(f"    {dumps(key)}: [" + ",".join("\n      " + dumps(row) for row in table) + "]")
        return "{\n" + ",\n".join(parts) + "\n  }"
    else:
        return dumps(value)
    return "[\n" + ",\n".join(rows) + "\n  ]" if rows else "[]"


def _plan(document: dict[str, Any]) -> Plan:
    hints = hints_of(Plan)

    def field(name: str, read: Callable[[Any], Any]) -> Any:
        try:
            return read(document[name])
        except (AttributeError, KeyError, TypeError, ValueError, EppError) as error:  # extensions raise errors of their own
            raise PlanError(f"field {name!r} of the plan is malformed: {error}") from None

    values: dict[str, Any] = {}
    for entry in fields(Plan):
        if entry.name in document:
            values[entry.name] = field(entry.name, CODEC.reader(hints[entry.name]))
        elif entry.default is MISSING:
            raise PlanError(f"the plan lacks the field {entry.name!r}")
    values["extensions"] = tuple(
        field(name, resolve_name(EXTENSIONS[name]).from_json) for name in EXTENSIONS if name in document
    )
    plan = Plan(**values)
    for name, count in (("num_stages", plan.num_stages), ("num_ranks", plan.num_ranks)):
        if name in document and field(name, whole) != count:
            raise PlanError(f"{name} is {document[name]}, but the plan lists {count}")
    return plan
