"""Costs and profiles as JSON with a schema and a version; every field that is read is checked for its type and limits."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_origin, get_type_hints

from megatron_epp.cost.work import Line
from megatron_epp.plan import EppError
from megatron_epp.plan.reading import (
    MOST_LAYERS,
    MOST_NUMBER,
    MOST_WHOLE,
    nearest,
    number,
    of_type,
    parse_json,
    printable,
    shown,
    whole,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_LEAST = {
    **dict.fromkeys(("heads", "kv_heads", "queries_per_key", "stage_ranks", "host_sharing", "host_turns"), 1),
    "weight_bytes": 0.125,
}
"""Smallest value, by the field's name; 0 of all others. A weight takes a bit at least."""
_MOST = {"count": MOST_LAYERS, "num_layers": MOST_LAYERS, "offloadable_share": 1.0, "fragmentation_share": 1.0}
"""Largest value, by the field's name."""


class Form(NamedTuple):
    """A kind of file.

    Attributes:
        name: used in error messages.
        schema, version: values of these fields in the file.
        of_older: makes the fields of this version of those of the one before; None if that is refused.
    """

    name: str
    schema: str
    version: int
    of_older: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def write(self, costs: DataclassInstance) -> str:
        """Return canonical JSON; a missing link to the host, whose copies take infinite time, is written as null."""
        body = {"schema": self.schema, "version": self.version, **asdict(costs)}
        if body["host_us_per_byte"] == math.inf:
            body["host_us_per_byte"] = None
        return json.dumps(body, sort_keys=True, indent=1, allow_nan=False)

    def read[T](self, kind: type[T], text: str, check: Callable[[T], None]) -> T:
        """Read what `write` wrote.

        Args:
            kind: dataclass of the result, see `build`; names that are not its fields are ignored.
            check: raises `EppError` if fields contradict each other.

        Raises:
            EppError: the text is something else.
        """
        try:
            body = of_type(dict, parse_json(text, "the text"), "a JSON object")
            form = body.get("schema"), body.get("version")
            if self.of_older is not None and form == (self.schema, self.version - 1):
                body = self.of_older(body)
            elif form != (self.schema, self.version):
                what, version = map(shown, form)
                raise EppError(f"schema {what} version {version}, where this reads {self.schema!r} {self.version}")
            check(costs := build(kind, body, ignore_unknown=True))
        except EppError as error:
            raise EppError(f"not a {self.name} ({error}); write one with `megatron-epp profile`") from error
        return costs


def build[T](kind: type[T], body: Any, where: str = "", *, ignore_unknown: bool = False) -> T:
    """Make a dataclass of times and sizes.

    Args:
        kind: dataclass whose fields are numbers, text, such dataclasses again, or tuples or dictionaries of these.
        body: the JSON object; null stands for a missing field.
        where: path of the object inside the file, for errors; empty at the top.
        ignore_unknown: ignore names that are not fields, unless they resemble a field that is missing.

    Raises:
        EppError: it is not an object, or a field is missing, unknown, of another type, negative or above its limit. The message
            names the field.
    """
    if not isinstance(body, dict):
        raise EppError(f"{where or 'the file'} is {shown(body)}, which is not a JSON object")
    at, hints = f"{where}." if where else "", _hints(kind)  # type: ignore[arg-type]
    values = {name: value for name, value in body.items() if value is not None}
    absent = [name for name in hints if name not in values]
    for name in values:
        hint = "" if name in hints else nearest(name, absent)
        if hint or not (name in hints or ignore_unknown):
            raise EppError(f"{at}{printable(name)} is unknown{hint}")
    arguments = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            arguments[field.name] = _value(hints[field.name], values[field.name], field.name, f"{at}{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise EppError(f"{at}{field.name} is missing")
    return kind(**arguments)


def check_part(where: str, part: Line, whole: Line) -> None:
    """Raise `EppError` if a line exceeds the line that it is a part of: the remainder would be negative."""
    if part.within(whole) != part:
        raise EppError(f"{where} is above the backward that it is a part of ({part} and {whole})")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any, name: str, where: str) -> Any:
    if isinstance(hint, types.UnionType):  # with None, which stands for a field that is not there
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise EppError(f"{where} is {shown(value)}, which is not a list")
        (inner, *_), addresses = get_args(hint), [f"{where}[{position}]" for position in range(len(value))]
        if inner in (float, int):
            return tuple(_value(inner, entry, name, at) for entry, at in zip(value, addresses, strict=True))
        return tuple(build(inner, entry, at) for entry, at in zip(value, addresses, strict=True))
    readers: dict[Any, Callable[[], Any]] = {
        float: lambda: number(value, _LEAST.get(name, 0), _MOST.get(name, MOST_NUMBER)),
        int: lambda: whole(value, int(_LEAST.get(name, 0)), int(_MOST.get(name, MOST_WHOLE))),
        str: lambda: of_type(str, value, "text"),
        dict: lambda: of_type(dict, value, "an object with names"),
    }
    read = readers.get(get_origin(hint) or hint)
    if read is None:
        return build(hint, value, where)
    try:
        result = read()
    except EppError as error:
        raise EppError(f"{where}: {error}") from None
    if get_origin(hint) is dict and (entries := get_args(hint)[1]) is not Any:
        return {key: build(entries, entry, f"{where}.{printable(key)}") for key, entry in result.items()}
    return result
