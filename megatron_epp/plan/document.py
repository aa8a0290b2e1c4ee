"""Plans as plain data, as files have them, with a digest that identifies a plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.codec import Codec, hints_of
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.grid import step_text
from megatron_epp.plan.plan import SCHEMA, VERSION, VERSION_WITH_BORROWED, Plan, Step
from megatron_epp.plan.reading import brief, number, of_type, whole
from megatron_epp.plan.recompute import Recompute

_LEFT_OUT_IF_EMPTY = ("kv_offload", "host_links", "host_cap_bytes", "message_bytes", "loss_groups", "borrowed")
_FIELDS = (
    *("schema", "version", "lengths", "num_stages", "num_ranks", "num_layers", "placement", "token_multiple", "forward_only"),
    *("chunks", "recompute", "recompute_us", "offload_share", "ranks", "copies", "messages", "static_bytes", "cap_bytes"),
    *("predicted", "costs", "planner", "seed", "notes"),
)
"""Order of the fields in files, behind the optional ones."""


def digest(plan: Plan) -> str:
    """SHA-256 of the plan's JSON, keys sorted and without spaces. Equal plans have equal digests."""
    return digest_of(document_of(plan))


def document_of(plan: Plan) -> dict[str, Any]:
    """Convert a plan to plain data in the file's layout. Times become floats and sizes ints, whatever their numeric type."""
    hints = hints_of(Plan)
    names = [name for name in (*_LEFT_OUT_IF_EMPTY, *_FIELDS) if name in hints]
    values = {name: CODEC.writer(hints[name])(getattr(plan, name)) for name in names}
    version = VERSION_WITH_BORROWED if plan.borrowed else VERSION
    values |= {"schema": SCHEMA, "version": version, "num_stages": plan.num_stages, "num_ranks": plan.num_ranks}
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


CODEC = Codec(
    readers={
        Step: _read_step,
        Recompute: lambda counts: Recompute(*map(whole, of_type(list, counts, "a list"))),
        Action: lambda name: Action.parse(of_type(str, name, "text")),
        Op: lambda name: Op(of_type(str, name, "text")),
    },
    to_plain={Step: _write_step, Recompute: lambda counts: list(map(int, counts)), Action: str, Op: str},
    ignores_unknown=True,
)


def dumps(value: Any, **options: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        raise PlanError("the plan holds a number that is infinite or not a number; JSON has none") from None


def digest_of(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
