"""Plans as lossless JSON, one step per line, with a digest that identifies a plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.extension import FIELDS, read_extension
from megatron_epp.plan.plan import SCHEMA, VERSION, Copy, KVOffload, Messages, Plan, Prediction, Step
from megatron_epp.plan.reading import infinite_at, naming, number, of_type, parse_json, read_text, shown, whole
from megatron_epp.plan.recompute import Recompute
from megatron_epp.plan.text import step_text
from megatron_epp.plan.writing import write_text

_COLUMNS = (
    "lengths",
    "num_layers",
    "half_layers",
    "placement",
    "host_links",
    "static_bytes",
    "cap_bytes",
    "host_cap_bytes",
    "notes",
)  # lists that stay on one line


def digest(plan: Plan) -> str:
    """SHA-256 of the plan's JSON, keys sorted and without spaces. Equal plans have equal digests."""
    return _digest(_document(plan))


def to_json(plan: Plan) -> str:
    """Return the plan as a JSON document of schema ``megatron-epp/plan``, version 3; `from_json` gives back an equal plan.

    Raises:
        PlanError: a number in it is infinite or not a number.
    """
    document = _document(plan)
    head = {"schema": document["schema"], "version": document["version"], "digest": _digest(document)}
    fields = ",\n".join(f"  {json.dumps(name)}: {_value(name, value)}" for name, value in (head | document).items())
    return "{\n" + fields + "\n}\n"


def from_json(text: str) -> Plan:
    """Read what `to_json` wrote. Unknown fields are ignored, but count towards the digest.

    Raises:
        PlanError: not JSON, another schema or version, a field that is missing or malformed, or a digest that does not match.
    """
    try:
        document = parse_json(text, "the plan")
    except EppError as error:
        raise PlanError(str(error)) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise PlanError(f"not a plan: schema is {shown(found)}, expected {SCHEMA!r}")
    version = document.get("version")
    if version != VERSION:
        raise PlanError(f"plan version {shown(version)} cannot be read, only {VERSION}; plan again with `megatron-epp plan`")
    claimed = document.pop("digest", None)
    try:
        actual = _digest(document)
    except PlanError as error:
        raise PlanError(f"{error}{infinite_at(text)}") from None
    if claimed != actual:
        raise PlanError(f"plan digest {shown(claimed)} does not match its content ({actual!r}): edited or damaged; plan again")
    return _plan(document)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan file, whole or not at all. Raises `PlanError`, which names the file."""
    try:
        write_text(path, to_json(plan))
    except OSError as error:
        raise PlanError(f"cannot write the plan to {path}: {error.strerror}") from error


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. Raises `PlanError`, which names the file."""
    with naming(path, PlanError):
        return from_json(read_text(path))


def _document(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain data in the file's layout. Times become floats and sizes ints, whatever their numeric type."""
    optional: dict[str, Any] = {}  # empty fields are not written
    if plan.kv_offload:
        optional["kv_offload"] = [_ints(entry) for entry in plan.kv_offload]
    if plan.host_links:
        optional["host_links"] = _ints(plan.host_links)
    if plan.host_cap_bytes:
        optional["host_cap_bytes"] = _ints(plan.host_cap_bytes)
    messages: dict[str, Any] = {
        "activation_us": [_floats(row) for row in plan.messages.activation_us],
        "gradient_us": [_floats(row) for row in plan.messages.gradient_us],
    }
    if plan.messages.num_bytes:
        messages["num_bytes"] = _ints(plan.messages.num_bytes)
    if plan.messages.collective_us:
        messages["collective_us"] = {str(op): _floats(row) for op, row in plan.messages.collective_us}
    if plan.messages.message_us:
        messages["message_us"] = {str(op): _floats(row) for op, row in plan.messages.message_us}
    if plan.message_bytes:
        optional["message_bytes"] = _ints(plan.message_bytes)
    if plan.half_layers:
        optional["half_layers"] = _ints(plan.half_layers)
    if plan.loss_groups:
        optional["loss_groups"] = [_ints(group) for group in plan.loss_groups]
    optional |= {extension.field: extension.to_json() for extension in plan.extensions}
    return optional | {
        "schema": SCHEMA,
        "version": VERSION,
        "lengths": _ints(plan.lengths),
        "num_stages": plan.num_stages,
        "num_ranks": plan.num_ranks,
        "num_layers": _ints(plan.num_layers),
        "placement": _ints(plan.placement),
        "token_multiple": int(plan.token_multiple),
        "forward_only": bool(plan.forward_only),
        "chunks": [{"segments": [_ints(segment) for segment in chunk.segments]} for chunk in plan.chunks],
        "recompute": [[_ints(counts) for counts in row] for row in plan.recompute],
        "recompute_us": [_floats(row) for row in plan.recompute_us],
        "offload_share": [_floats(row) for row in plan.offload_share],
        "ranks": [_steps(row) for row in plan.ranks],
        "copies": [_copies(row) for row in plan.copies],
        "messages": messages,
        "static_bytes": _ints(plan.static_bytes),
        "cap_bytes": _ints(plan.cap_bytes),
        "predicted": {
            "makespan_us": float(plan.predicted.makespan_us),
            "lower_bound_us": float(plan.predicted.lower_bound_us),
            "peak_bytes": _ints(plan.predicted.peak_bytes),
            "bubble_fraction": float(plan.predicted.bubble_fraction),
        },
        "costs": plan.costs,
        "planner": plan.planner,
        "seed": int(plan.seed),
        "notes": list(plan.notes),
    }


def _ints(row: Sequence[int]) -> list[int]:
    return [int(value) for value in row]


def _floats(row: Sequence[float]) -> list[float]:
    return [float(value) for value in row]


def _steps(row: Sequence[Step]) -> list[list[Any]]:
    return [[step_text(step), float(step.time_us), int(step.alloc_bytes), int(step.free_bytes)] for step in row]


def _copies(row: Sequence[Copy]) -> list[list[Any]]:
    steps = _steps([Step(*copy[:4]) for copy in row])
    return [[*step, None if copy.after is None else str(copy.after)] for step, copy in zip(steps, row, strict=True)]


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
    elif isinstance(value, list) and name not in _COLUMNS:
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
    def field(name: str, read: Callable[[Any], Any], *default: Any) -> Any:
        if name not in document:
            if default:
                return default[0]
            raise PlanError(f"the plan lacks the field {name!r}")
        try:
            return read(document[name])
        except (AttributeError, KeyError, TypeError, ValueError, EppError) as error:
            raise PlanError(f"field {name!r} of the plan is malformed: {error}") from None

    plan = Plan(
        lengths=field("lengths", _int_row),
        chunks=field("chunks", lambda rows: tuple(_chunk(row) for row in rows)),
        num_layers=field("num_layers", _int_row),
        placement=field("placement", _int_row),
        recompute=field("recompute", _recompute_table),
        recompute_us=field("recompute_us", _float_table),
        offload_share=field("offload_share", _float_table),
        ranks=field("ranks", _step_table),
        copies=field("copies", lambda rows: tuple(tuple(map(_copy, row)) for row in rows), ()),
        host_links=field("host_links", _int_row, ()),
        half_layers=field("half_layers", _int_row, ()),
        extensions=tuple(field(name, partial(read_extension, name)) for name in FIELDS if name in document),
        loss_groups=field("loss_groups", lambda rows: tuple(map(_int_row, rows)), ()),
        kv_offload=field("kv_offload", lambda rows: tuple(KVOffload(*_int_row(row)) for row in rows), ()),
        messages=field("messages", _messages),
        message_bytes=field("message_bytes", _int_row, ()),
        static_bytes=field("static_bytes", _int_row),
        cap_bytes=field("cap_bytes", _int_row),
        host_cap_bytes=field("host_cap_bytes", _int_row, ()),
        predicted=field("predicted", _prediction),
        token_multiple=field("token_multiple", whole, 1),
        forward_only=field("forward_only", _bool, False),
        costs=field("costs", _str, "analytic"),
        planner=field("planner", _str, "greedy"),
        seed=field("seed", whole, 0),
        notes=field("notes", lambda row: tuple(map(_str, row)), ()),
    )
    for name, count in (("num_stages", plan.num_stages), ("num_ranks", plan.num_ranks)):
        if field(name, whole, count) != count:
            raise PlanError(f"{name} is {document[name]}, but the plan lists {count}")
    return plan


def _str(value: Any) -> str:
    return of_type(str, value, "text")


def _bool(value: Any) -> bool:
    return of_type(bool, value, "true or false")


def _int_row(row: Any) -> tuple[int, ...]:
    return tuple(map(whole, row))


def _float_row(row: Any) -> tuple[float, ...]:
    return tuple(map(number, row))


def _float_table(rows: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(map(_float_row, rows))


def _recompute_table(rows: Any) -> tuple[tuple[Recompute, ...], ...]:
    return tuple(tuple(Recompute(*_int_row(counts)) for counts in row) for row in rows)


def _messages(value: Any) -> Messages:
    times = {name: _float_table(value[name]) for name in ("activation_us", "gradient_us")}
    collective_us, message_us = (
        tuple((Op(name), _float_row(row)) for name, row in value.get(key, {}).items())
        for key in ("collective_us", "message_us")
    )
    num_bytes = _int_row(value.get("num_bytes", ()))
    return Messages(**times, num_bytes=num_bytes, collective_us=collective_us, message_us=message_us)


def _chunk(value: Any) -> Chunk:
    return Chunk(tuple(Segment(*_int_row(segment)) for segment in value["segments"]))


def _step(value: Any) -> Step:
    text, time, alloc, free = value
    action, *also = map(Action.parse, _str(text).split("+"))
    return Step(action, number(time), whole(alloc), whole(free), tuple(also))


def _copy(value: Any) -> Copy:
    *step, after = value
    return Copy(*_step(step)[:4], None if after is None else Action.parse(_str(after)))


def _step_table(rows: Any) -> tuple[tuple[Step, ...], ...]:
    return tuple(tuple(_step(value) for value in row) for row in rows)


def _prediction(value: Any) -> Prediction:
    numbers = (number(value[name]) for name in ("makespan_us", "lower_bound_us", "bubble_fraction"))
    makespan_us, lower_bound_us, bubble_fraction = numbers
    return Prediction(makespan_us, lower_bound_us, _int_row(value["peak_bytes"]), bubble_fraction)
