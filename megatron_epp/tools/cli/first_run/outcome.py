"""Steps of the first run on a machine, the state that they share, what each found, and the report of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_epp.tools.cli.first_run.launch import StockLaunch
from megatron_epp.tools.formulas.library import Cluster

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Setting:
    folder: Path  # where logs and reports go
    machine: str  # name of this machine's GPUs or processor
    num_gpus: int
    is_reduced: bool  # everything is tiny, as on a CPU
    launch: StockLaunch  # the user's launch command, as it is today; an example unless `has_launch`
    has_launch: bool
    cluster: Cluster  # kind of machine that plans are for
    lengths_from: str  # source of the lengths, a value of ``--lengths``


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step: `found` has lines for people, `figures` the same for programs, with units in the names."""

    status: str  # ``passed``, ``failed`` or ``skipped``
    found: tuple[str, ...]
    todo: str = ""  # about a failure or a skip
    figures: dict[str, Any] = field(default_factory=dict)
    time_s: float = 0.0

    @staticmethod
    def judged(holds: bool, lines: Sequence[str], todo: str, figures: dict[str, Any]) -> Outcome:
        """Make the result of a step that passes if a condition holds; `todo` is for the case that it does not."""
        return Outcome(PASSED if holds else FAILED, tuple(lines), todo * (not holds), figures)

    def lines(self) -> str:
        """Format the result, indented below the step's heading."""
        lines = [*self.found, f"{self.status}, {self.time_s:.1f} s", *[f"-> {self.todo}"] * bool(self.todo)]
        return "\n".join(f"  {line}".rstrip() for text in lines for line in text.split("\n"))


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """A step that ``--steps`` selects by its name; `run` raises `EppError`."""

    name: str
    purpose: str
    expect: str  # what one sees where all is well
    on_failure: str  # what to do where the step ends in an error
    gpu_minutes: int  # estimate for a node of GPUs
    run: Callable[[Setting], Outcome]
    is_asked_for: bool = False  # it runs only where it is asked for


def verdict(done: Mapping[str, Outcome]) -> str:
    counts = []
    for status in (PASSED, FAILED, SKIPPED):
        if names := [name for name, outcome in done.items() if outcome.status == status]:
            counts.append(f"{len(names)} {status}" + f" ({', '.join(names)})" * (status != PASSED))
    return f"{', '.join(counts)}, {sum(outcome.time_s for outcome in done.values()):.0f} s in all"


REDUCED = "reduced form: sizes are tiny and links are gloo's, so passing says that the code works here and times say nothing"
