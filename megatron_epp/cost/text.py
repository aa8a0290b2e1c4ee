"""Costs and profiles as JSON with a schema and a version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple, Protocol

from megatron_epp.plan import EppError
from megatron_epp.plan.reading import parse_json, shown


class HostCosts(Protocol):
    """Dataclass of costs that include a link to the host."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def host_us_per_byte(self) -> float:
        """Time per byte of a copy between device and host; infinite without a link."""


class Form(NamedTuple):
    """A kind of file.

    Attributes:
        name: used in error messages.
        schema, version: values of these fields in the file.
    """

    name: str
    schema: str
    version: int

    def write(self, costs: HostCosts) -> str:
        """Return canonical JSON; a missing link to the host is written as null."""
        body = {"schema": self.schema, "version": self.version, **asdict(costs)}
        if math.isinf(costs.host_us_per_byte):
            body["host_us_per_byte"] = None
        return json.dumps(body, sort_keys=True, indent=1, allow_nan=False)

    def read[T](self, text: str, build: Callable[[dict[str, Any]], T]) -> T:
        """Read what `write` wrote.

        Args:
            text: JSON.
            build: makes the object of the fields. Raises `EppError`.

        Raises:
            EppError: the text is something else.
        """
        try:
            body = parse_json(text, "the text")
            if not isinstance(body, dict):
                raise EppError(f"{shown(body)} is no object with names")
            if (found := (body.get("schema"), body.get("version"))) != (self.schema, self.version):
                what, version = map(shown, found)
                raise EppError(f"schema {what} version {version}, where this reads {self.schema!r} {self.version}")
            return build(body)
        except EppError as error:
            raise EppError(f"not a {self.name} ({error}); write one with `megatron-epp profile`") from error
