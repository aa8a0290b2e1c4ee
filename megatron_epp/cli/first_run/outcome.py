"""Steps of the first run on a machine, what each found, and the report of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_epp.cli.first_run.setting import Setting

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step.

    Attributes:
        status: ``passed``, ``failed`` or ``skipped``.
        found: lines for people.
        todo: what to do about a failure or a skip; empty where nothing is to be done.
        figures: the same for programs, with units in the names.
    """

    status: str
    found: tuple[str, ...]
    todo: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def judged(holds: bool, lines: Sequence[str], todo: str, figures: dict[str, Any]) -> Outcome:
        """Make the result of a step that passes if a condition holds; `todo` is for the case that it does not."""
        return Outcome(PASSED if holds else FAILED, tuple(lines), "" if holds else todo, figures)


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """One step.

    Attributes:
        name: one word, by which ``--steps`` selects it.
        purpose: what it does.
        expect: what one sees where all is well.
        on_failure: what to do where the step ends in an error.
        gpu_minutes: estimated time on a node of GPUs.
        run: does it. Raises `EppError`.
        is_asked_for: it is run only where it is asked for.
    """

    name: str
    purpose: str
    expect: str
    on_failure: str
    gpu_minutes: int
    run: Callable[[Setting], Outcome]
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was run, and the seconds that it took."""

    name: str
    purpose: str
    outcome: Outcome
    time_s: float


def heading(number: int, total: int, step: MachineCheck, is_reduced: bool) -> str:
    """Format the lines that announce a step."""
    time = "" if is_reduced else f" (about {step.gpu_minutes} min)"
    return f"\n[{number}/{total}] {step.name}: {step.purpose}{time}\n  expect: {step.expect}"


def outcome_lines(done: Done) -> str:
    """Format a step's result, indented below its heading."""
    lines = [*done.outcome.found, f"{done.outcome.status}, {done.time_s:.1f} s"]
    if done.outcome.todo:
        lines.append(f"-> {done.outcome.todo}")
    return "\n".join(f"  {line}".rstrip() for text in lines for line in text.split("\n"))


def verdict(steps: Sequence[Done]) -> str:
    """Summarize all steps in a line."""
    named = {status: [step.name for step in steps if step.outcome.status == status] for status in (PASSED, FAILED, SKIPPED)}
    counts = [
        f"{len(names)} {status}" + f" ({', '.join(names)})" * (status != PASSED) for status, names in named.items() if names
    ]
    return f"{', '.join(counts)}, {sum(step.time_s for step in steps):.0f} s in all"


def report_of(setting: Setting, versions: dict[str, Any], steps: Sequence[Done]) -> dict[str, Any]:
    """Return the report as it is written to a file, with the lines that were printed."""
    return {
        "machine": setting.machine,
        "is_reduced": setting.is_reduced,
        "versions": versions,
        "launch": setting.launch.words,
        "verdict": verdict(steps),
        "steps": [asdict(step) for step in steps],
    }


REDUCED = "reduced form: sizes are tiny and links are gloo's, so passing says that the code works here and times say nothing"
