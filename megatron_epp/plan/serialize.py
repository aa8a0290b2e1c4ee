"""Plans as lossless JSON, one step per line, with a digest that identifies a plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pkgutil import resolve_name
from typing import Any

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.codec import Codec, hints_of
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.grid import step_text
from megatron_epp.plan.plan import EXTENSIONS, SCHEMA, VERSION, Plan, Step
from megatron_epp.plan.reading import brief, infinite_at, naming_file, number, of_type, parse_json, read_text, whole
from megatron_epp.plan.recompute import Recompute
from megatron_epp.plan.writing import write_text

_LEFT_OUT_IF_EMPTY = ("kv_offload", "host_links", "host_cap_bytes", "message_bytes", "half_layers", "loss_groups")
_FIELDS = (
    *("schema", "version", "lengths", "num_stages", "num_ranks", "num_layers", "placement", "token_multiple", "forward_only"),
    *("chunks", "recompute", "recompute_us", "offload_share", "ranks", "copies", "messages", "static_bytes", "cap_bytes"),
    *("predicted", "costs", "planner", "seed", "notes"),
)
"""Order of the fields in files, behind the optional ones."""
_ON_ONE_LINE = frozenset(
    ("lengths", "num_layers", "half_layers", "placement", "host_links", "static_bytes", "cap_bytes", "host_cap_bytes", "notes")
)


def digest(plan: Plan) -> str:
    """SHA-256 of the plan's JSON, keys sorted and without spaces. Equal plans have equal digests."""
    return _digest(_document(plan))


def to_json(plan: Plan) -> str:
    """Return JSON of schema ``megatron-epp/plan``, version 3. Raises `PlanError` if a number is infinite or NaN."""
    document = _document(plan)
    head = {"schema": document["schema"], "version": document["version"], "digest": _digest(document)}
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
    if version != VERSION:
        raise PlanError(f"plan version {brief(version)} cannot be read, only {VERSION}; plan again with `megatron-epp plan`")
    claimed = document.pop("digest", None)
    try:
        actual = _digest(document)
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


def _document(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain data in the file's layout. Times become floats and sizes ints, whatever their numeric type."""
    hints = hints_of(Plan)
    names = [name for name in (*_LEFT_OUT_IF_EMPTY, *_FIELDS) if name in hints]
    values = {name: _CODEC.writer(hints[name])(getattr(plan, name)) for name in names}
    values |= {"schema": SCHEMA, "version": VERSION, "num_stages": plan.num_stages, "num_ranks": plan.num_ranks}
    extensions = {extension.field: extension.to_json() for extension in plan.extensions}
    optional = {name: values[name] for name in _LEFT_OUT_IF_EMPTY if values[name]}
    return optional | extensions | {name: values[name] for name in _FIELDS}


def _write_step(step: Step) -> list[Any]:
    return [step_text(step), float(step.time_us), int(step.alloc_bytes), int(step.free_bytes)]


def _read_step(value: Any) -> Step:
    if not isinstance(value, list) or len(value) != 4:
        raise EppError(f"{brief(value)} is not a list of actions, time_us, alloc_bytes, free_bytes")
    text, time_us, alloc_bytes, free_bytes = value
    action, *also = map(Action.parse, of_type(str, text, "text").split("+"))
    return Step(action, number(time_us), whole(alloc_bytes), whole(free_bytes), tuple(also))


_CODEC = Codec(
    readers={
        Step: _read_step,
        Recompute: lambda counts: Recompute(*map(whole, of_type(list, counts, "a list"))),
        Action: lambda name: Action.parse(of_type(str, name, "text")),
        Op: lambda name: Op(of_type(str, name, "text")),
    },
    to_plain={Step: _write_step, Recompute: lambda counts: list(map(int, counts)), Action: str, Op: str},
    ignores_unknown=True,
)


def _dumps(value: Any, **options: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        raise PlanError("the plan holds a number that is infinite or not a number; JSON has none") from None


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _value(name: str, value: Any) -> str:
    """Format a field's value: steps and rows one per line, short lists and scalars on the field's own line."""
    if name in ("ranks", "copies"):
        rows = ["    [" + ",".join("\n      " + _dumps(step) for step in row) + "]" for row in value]
    elif isinstance(value, list) and name not in _ON_ONE_LINE:
        rows = ["    " + _dumps(row) for row in value]
    elif name == "messages":
        parts = []
        for key, table in value.items():
            if key in ("num_bytes", "collective_us", "message_us"):
                parts.append(f"    {_dumps(key)}: {_dumps(table)}")
            else:
                parts.append(f"    {_dumps(key)}: [" + ",".join("\n      " + _dumps(row) for row in table) + "]")
        return "{\n" + ",\n".join(parts) + "\n  }"
    else:
        return _dumps(value)
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
            values[entry.name] = field(entry.name, _CODEC.reader(hints[entry.name]))
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
