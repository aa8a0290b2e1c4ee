"""Parts of a plan that other packages define: each is a field of the plan's file, with a type of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from megatron_epp.plan.chunk import Chunk

FIELDS = {"context_groups": "megatron_epp.contrib.papers.context_groups:ContextGroups"}
"""Fields of plan files, each with the type of its values as ``module:type``, which is imported when a file has the field. Its
`from_json` reads the value, and raises `EppError`, or another error of the value's form."""


class Extension(Protocol):
    """Part of a plan. Two of the same content are equal.

    Attributes:
        field: its name in plan files.
        lacks: what training would need to run a plan with it; empty if it runs.
    """

    field: ClassVar[str]
    lacks: ClassVar[str]

    def faults(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> Iterator[str]:
        """Yield what is wrong with it in a plan.

        Args:
            lengths: tokens of every sequence.
        """
        ...

    def divided(self, chunk: int) -> Sequence[tuple[str, Sequence[int]]]:
        """Return the parts into which it divides a chunk, each with a name and the positions of its segments."""
        ...

    def to_json(self) -> Any:
        """Return plain data for a plan file; `from_json` of its type gives an equal object."""
        ...
