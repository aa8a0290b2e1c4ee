"""Measured times of a run of a plan.

The runtime writes measured times as JSON, in microseconds since the start of the iteration::

    {"schema": "megatron-epp/measured", "version": 1, "plan_digest": "hex",
     "ranks": [[["0F0", 0.0, 812.5], ["0F1", 830.2, 1650.0, 790.4]]]}

The optional fourth number is processor time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_epp.plan.action import Action
from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.errors import EppError, PlanError
from megatron_epp.plan.operations import is_compute
from megatron_epp.plan.reading import brief, naming_file, number, read_text
from megatron_epp.plan.writing import write_text


class Event(NamedTuple):
    """One action as it ran, in microseconds since the start of the iteration, on a clock the ranks share.

    `cpu_us` is its processor time, less than the elapsed time if other programs used the core; None on a GPU.
    """

    action: Action
    start_us: float
    end_us: float
    cpu_us: float | None = None

    @property
    def took_us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True)
class Measured:
    """One iteration as it ran."""

    plan_digest: str  # digest of the plan that was run
    # The events of each rank in order of start. Compute actions (F, B, W, R) feed the pictures; copies (O, L) and waits for
    # messages (under the name of the receive) may be included.
    ranks: tuple[tuple[Event, ...], ...]

    @property
    def makespan_us(self) -> float:
        return max((event.end_us for events in self.ranks for event in events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they did not compute, 0 to 1."""
        total = len(self.ranks) * self.makespan_us
        busy = sum(e.took_us for events in self.ranks for e in events if is_compute(e.action.op))
        return 1.0 - busy / total if total else 0.0

    @staticmethod
    def of(plan_digest: str, ranks: Iterable[Iterable[Sequence[Any]]]) -> Measured:
        """Make the measurement of a run of a plan.

        Each action is its text, start and end in microseconds and, where known, its processor time.
        """
        events = (tuple(Event(Action.parse(text), *times) for text, *times in rank) for rank in ranks)
        return Measured(plan_digest, tuple(events))

    def to_json(self) -> str:
        ranks = [
            [[str(e.action), e.start_us, e.end_us, *([] if e.cpu_us is None else [e.cpu_us])] for e in events]
            for events in self.ranks
        ]
        return json.dumps(_FORMAT.head | {"plan_digest": self.plan_digest, "ranks": ranks})

    @staticmethod
    def from_json(text: str) -> Measured:
        """Read `to_json`. Raises `PlanError` if the text is not a measurement of a version this package reads."""
        try:
            return _FORMAT.parse(Measured, text)
        except EppError as error:
            raise PlanError(
                f"not a measurement: {error}; expected the JSON the runtime writes, schema {_FORMAT.schema!r} version "
                f"{_FORMAT.version}"
            ) from error

    def save(self, path: str | Path) -> None:
        write_text(path, self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Measured:
        """Read a file. Raises `PlanError` if it is missing or is not a measurement."""
        with naming_file(path, PlanError):
            return Measured.from_json(read_text(path))


def _event(entry: Any) -> Event:
    if not isinstance(entry, list) or len(entry) not in (3, 4) or not isinstance(entry[0], str):
        raise EppError(f"{brief(entry)} is not an action with its start, its end and perhaps its processor time")
    action, start_us, end_us = Action.parse(entry[0]), number(entry[1]), number(entry[2])
    if not 0 <= start_us <= end_us:
        raise EppError(f"event {action} starts at {start_us} us and ends at {end_us} us; expected 0 <= start <= end")
    return Event(action, start_us, end_us, None if entry[3:] in ([], [None]) else number(entry[3]))


_FORMAT = FileFormat("measurement", "megatron-epp/measured", 1, Codec(readers={Event: _event}))
