"""Values of files, read and written by the types of dataclasses' fields: one codec for plans, costs, layouts and measurements.

In JSON a dataclass is an object, a named tuple or a tuple is a list, and a tuple of pairs is an object too. Every value that is
read is checked for its type and limits; an error names its path in the file.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache, partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import MOST_NUMBER, MOST_WHOLE, brief, nearest, number, of_type, parse_json, printable, whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

type Converter = Callable[[Any], Any]


class MalformedError(EppError):
    """A value of a file has another type than its field, or is outside its limits.

    Its text is `path`, as in ``stages[0].kv``, and `behind`; for the whole of what is read, whose path is empty, `message`.
    """

    def __init__(self, message: str, path: str = "", behind: str = "") -> None:
        super().__init__(path + behind if path else message)
        self.path, self.behind = path, behind


def _not_a(noun: str, value: Any) -> MalformedError:
    return MalformedError(f"{brief(value)} is not {noun}", behind=f" is {brief(value)}, which is not {noun}")


def _converted(entries: Iterable[tuple[str | int, Converter, Any]]) -> list[Any]:
    """Convert values. Raises `MalformedError`, whose path begins with the name or position of the value."""
    values: list[Any] = []
    key: str | int = ""
    try:
        for key, read, value in entries:  # noqa: B007 - `key` is used where one of them fails
            values.append(read(value))
    except (EppError, TypeError, ValueError) as error:
        path, behind = (error.path, error.behind) if isinstance(error, MalformedError) else ("", f": {error}")
        outer = f"[{key}]" if isinstance(key, int) else printable(key)
        raise MalformedError("", f"{outer}{'.' if path and path[0] != '[' else ''}{path}", behind) from None
    return values


@dataclass(frozen=True, eq=False)
class Codec:
    """Conversion of values to plain data of JSON and back."""

    # Of types that are no dataclasses or tuples of values; they raise `EppError`, TypeError or ValueError
    readers: Mapping[type, Converter] = field(default_factory=dict)
    # Formats values of these types; others are numbers and text, which are converted to their field's type
    to_plain: Mapping[type, Converter] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)  # limits of numbers, by the field's name
    most: Mapping[str, float] = field(default_factory=dict)  # limits of numbers, by the field's name
    least_of_others: float = -MOST_NUMBER  # smallest number in other fields; the largest are `MOST_NUMBER` and `MOST_WHOLE`
    ignores_unknown: bool = False  # objects may have names that are not fields

    def read[T](self, kind: type[T], body: Any, *, ignore_unknown: bool = False) -> T:
        """Make a dataclass of a JSON object; null stands for a missing field.

        Raises `MalformedError` if it is no object, or a field is missing, unknown, of another type, or outside its limits. With
        `ignore_unknown`, other fields of this object alone are ignored, but not names that resemble a missing field.
        """
        if not isinstance(body, dict):
            raise _not_a("a JSON object", body)
        hints = hints_of(kind)  # type: ignore[arg-type]
        present = {name: value for name, value in body.items() if value is not None}
        absent = [name for name in hints if name not in present]
        for name in (name for name in present if name not in hints):
            if (similar := nearest(name, absent)) or not (ignore_unknown or self.ignores_unknown):
                raise MalformedError("", printable(name), f" is unknown{similar}")
        for entry in fields(kind):  # type: ignore[arg-type]
            if entry.name in absent and entry.default is MISSING and entry.default_factory is MISSING:
                if not isinstance(hints[entry.name], types.UnionType):
                    raise MalformedError("", entry.name, " is missing")
                present[entry.name] = None
        names = [name for name in hints if name in present]
        values = _converted((name, self.reader(hints[name], name), present[name]) for name in names)
        return kind(**dict(zip(names, values, strict=True)))

    @cache  # noqa: B019 - codecs are constants of modules
    def reader(self, hint: Any, name: str = "") -> Converter:
        if isinstance(hint, types.UnionType):  # with None
            read = self.reader(get_args(hint)[0], name)
            return lambda value: None if value is None else read(value)
        kind, of = get_origin(hint) or hint, get_args(hint)
        if kind in self.readers:
            return self.readers[kind]
        least = self.least.get(name, self.least_of_others)
        if kind is float:
            return partial(number, least=least, most=self.most.get(name, MOST_NUMBER))
        if kind is int:
            return partial(whole, least=int(max(least, -MOST_WHOLE)), most=int(self.most.get(name, MOST_WHOLE)))
        if kind in _PLAIN:
            return lambda value: of_type(kind, value, _PLAIN[kind])
        if pair := _pair(of):
            read_key, read_object = self.reader(pair[0]), self.reader(dict[str, pair[1]], name)  # type: ignore[valid-type]
            return lambda value: tuple((read_key(key), entry) for key, entry in read_object(value).items())
        if issubclass(kind, Mapping):
            return partial(_read_object, (lambda value: value) if of[1] is Any else self.reader(of[1], name))
        if kind is tuple:
            return partial(_read_list, self.reader(of[0], name))
        if issubclass(kind, tuple):
            return partial(_read_named_tuple, kind, [self.reader(inner, key) for key, inner in hints_of(kind).items()])
        return partial(self.read, kind)

    @cache  # noqa: B019 - codecs are constants of modules
    def writer(self, hint: Any) -> Converter:
        """Return the function that makes plain data of values of a type. Fields with their default value are not written."""
        if isinstance(hint, types.UnionType):  # with None
            write = self.writer(get_args(hint)[0])
            return lambda value: None if value is None else write(value)
        kind, of = get_origin(hint) or hint, get_args(hint)
        if kind in self.to_plain:
            return self.to_plain[kind]
        if pair := _pair(of):
            write = self.writer(pair[1])
            return lambda pairs: {str(key): write(value) for key, value in pairs}
        if kind is tuple:
            write = self.writer(of[0])
            return lambda row: list(map(write, row))
        if is_dataclass(kind):
            hints = hints_of(kind)  # type: ignore[arg-type]
            columns = [(entry.name, entry.default, self.writer(hints[entry.name])) for entry in fields(kind)]
            return lambda value: {
                name: write(getattr(value, name)) for name, default, write in columns if getattr(value, name) != default
            }
        if issubclass(kind, tuple):
            inner = [self.writer(inner) for inner in hints_of(kind).values()]
            return lambda row: [write(value) for write, value in zip(inner, row, strict=True)]
        return kind  # type: ignore[no-any-return]


_PLAIN: dict[Any, str] = {str: "text", bool: "true or false"}


hints_of = cache(get_type_hints)


def _pair(of: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the types of key and value of a tuple of pairs, ``tuple[tuple[Key, Value], ...]``; empty for other types."""
    inner = get_args(of[0]) if of and get_origin(of[0]) is tuple else ()
    return inner if len(inner) == 2 and inner[1] is not ... else ()


def _read_list(read: Converter, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _not_a("a list", value)
    return tuple(_converted(zip(count(), repeat(read), value)))


def _read_object(read: Converter, value: Any) -> dict[str, Any]:
    names = of_type(dict, value, "an object with names")
    return dict(zip(names, _converted((key, read, entry) for key, entry in names.items()), strict=True))


def _read_named_tuple(kind: Any, readers: Sequence[Converter], value: Any) -> Any:
    if not isinstance(value, list) or not len(readers) - len(kind._field_defaults) <= len(value) <= len(readers):
        raise _not_a(f"a list of {', '.join(kind._fields)}", value)
    return kind(*_converted(zip(count(), readers, value)))


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file: a JSON object with a schema and a version. `name` is for error messages."""

    name: str
    schema: str
    version: int
    codec: Codec

    @property
    def head(self) -> dict[str, Any]:
        return {"schema": self.schema, "version": self.version}

    def check(self, body: Mapping[str, Any], before: str = "") -> None:
        """Raise `EppError`, with more text in front, if a file has another schema or version."""
        schema, version = body.get("schema"), body.get("version")
        if (schema, version) != (self.schema, self.version):
            raise EppError(
                f"{before}schema {brief(schema)} version {brief(version)}, where this reads {self.schema!r} {self.version}"
            )

    def write(self, value: DataclassInstance) -> str:
        """Return canonical JSON; an infinite number, as the time per byte of a missing link, is written as null."""
        body = {name: None if entry == math.inf else entry for name, entry in asdict(value).items()}
        return json.dumps(self.head | body, sort_keys=True, indent=1, allow_nan=False)

    def parse[T](self, kind: type[T], text: str, what: str = "the text") -> T:
        """Read the text of a file; names that are not fields are ignored, see `Codec.read`. Raises `EppError`."""
        body = of_type(dict, parse_json(text, what), "a JSON object")
        self.check(body)
        return self.codec.read(kind, body, ignore_unknown=True)

    def read[T](self, kind: type[T], text: str, check: Callable[[T], None]) -> T:
        """Read what `write` wrote. Raises `EppError` for another text, or from `check`, if fields contradict each other."""
        try:
            value = self.parse(kind, text)
            check(value)
        except EppError as error:
            raise EppError(f"not a {self.name} ({error}); write one with `megatron-epp profile`") from error
        return value
