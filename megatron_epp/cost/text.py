"""Costs and profiles as JSON with a schema and a version."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_epp.cost.line import Line, level_from
from megatron_epp.schedule import LEVELS, EppError

if TYPE_CHECKING:
    from megatron_epp.cost.profile import Profile
    from megatron_epp.cost.stage import PipelineCosts


class Form(NamedTuple):
    """A kind of file.

    Attributes:
        name: as errors call it.
        schema, version: as it says of itself.
    """

    name: str
    schema: str
    version: int

    def write(self, costs: PipelineCosts | Profile) -> str:
        """Canonical JSON; no link to the host is written as null."""
        body = {"schema": self.schema, "version": self.version, **asdict(costs)}
        if math.isinf(costs.host_us_per_byte):
            body["host_us_per_byte"] = None
        return json.dumps(body, sort_keys=True, indent=1, allow_nan=False)

    def read[T](self, text: str, build: Callable[[dict[str, Any]], T]) -> T:
        """Read what `write` wrote.

        Args:
            text: JSON.
            build: makes the object of all fields that are not null.

        Raises:
            EppError: the text is something else.
        """
        try:
            body = json.loads(text)
            if (body["schema"], body["version"]) != (self.schema, self.version):
                found = f"{body['schema']!r} version {body['version']}"
                raise EppError(f"{self.name} is {found}; this reads {self.schema!r} {self.version}")
            return build({name: value for name, value in body.items() if value is not None})
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise EppError(f"not a {self.name} ({reason}); write one with `megatron-epp profile`") from error


def with_lines(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a part of a model, levels of recompute and lines made of what JSON has in their place."""
    levels = {name: level_from(body[name]) for name in LEVELS if isinstance(body.get(name), dict)}
    lines = {name: Line(**value) for name, value in body.items() if isinstance(value, dict) and name not in levels}
    return {**body, **lines, **levels}
