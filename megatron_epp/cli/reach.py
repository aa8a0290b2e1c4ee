"""Search for the limits of what fits in memory, by several processes and with a time limit."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megatron_epp.cli.terminal import progress
from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.units import format_gib
from megatron_epp.planner.limits import Limit, Limits, Reach
from megatron_epp.report.table import format_us, table

_COARSE = 8
"""A limit is coarse if what does not fit is farther from it than this part of it: there was no time to look between them."""
_LATE = "not found in time (--seconds)"
_SOME = 3
"""Multiple of the seconds so far that is named where none of the sizes was tried to its end."""

Answer = tuple[Limit, Plan | None]
_UNKNOWN: Answer = (Limit(None), None)


class _Question(NamedTuple):
    """Limit that a process searches for: the names of the choice and of the limit, the process, and its answers so far."""

    choice: str
    name: str
    process: Any
    pipe: Connection


class Reached(NamedTuple):
    """Limits that were found in time.

    Attributes:
        reaches: the limits of each choice.
        hint: how long all would take, by the sizes that were tried so far; empty if nothing is missing.
    """

    reaches: dict[str, Reach]
    hint: str


def look(choices: Mapping[str, Limits], end_s: float, start_s: float) -> Reached:
    """Return the limits of each choice that are found until a point in time (by `time.monotonic`).

    Every limit is looked for in a process forked from this one, in which no other threads may run.

    Args:
        choices: where to look, by name.

    Raises:
        EppError: there is no limit, whatever the memory.
    """
    known = {choice: dict.fromkeys(limits.questions(), _UNKNOWN) for choice, limits in choices.items()}
    asked, tried, begin_s = list[_Question](), dict[Connection, int](), time.monotonic()
    if time.monotonic() < end_s:
        asked += [_asked(choice, name, choices[choice]) for choice, names in known.items() for name in names]
    waiting = {one.pipe: one for one in asked}
    try:
        with progress("looking for what fits", lambda: f"{len(asked) - len(waiting)} of {len(asked)} limits"):
            while waiting and (ready := connection.wait(list(waiting), max(0, end_s - time.monotonic()))):
                for one in [waiting[pipe] for pipe in ready if isinstance(pipe, Connection)]:
                    answer, is_last = _heard(one.pipe)
                    if answer is None:
                        tried[one.pipe] = tried.get(one.pipe, 0) + (not is_last)
                    else:
                        known[one.choice][one.name] = answer
                    if is_last:
                        del waiting[one.pipe]
    finally:
        for one in asked:
            one.process.kill()
            one.process.join()
    found: dict[str, Reach] = {}
    for choice, answers in known.items():
        alone, batch = (answers[name][0] if name in answers else None for name in ("alone", "batch"))
        with_rest = answers["with_rest"][0] if "with_rest" in answers else alone
        found[choice] = Reach(alone, with_rest, batch, *answers["cap"])
    unknown = [(choices[one.choice].tries(one.name), tried.get(one.pipe, 0)) for one in waiting.values()]
    if not asked:
        unknown = [(1, 0)] * len(known)
    return Reached(found, _hint(unknown, begin_s - start_s, end_s - begin_s))


def _hint(unknown: Sequence[tuple[int, int]], before_s: float, took_s: float) -> str:
    """Say how long the limits would take that were not found in time.

    Args:
        unknown: for each of these limits, the usual number of sizes to try, and the number tried so far.
        before_s: seconds of the command before it looked for limits.
        took_s: seconds for which it looked.
    """
    if not unknown:
        return ""
    if any(tried == 0 for _, tried in unknown):
        wanted_s = _SOME * (before_s + max(0.0, took_s))
        return (
            f"Not one size was tried in time for some of these limits, since planning alone took {before_s:.0f} s: give "
            f"--seconds {_rounded(wanted_s)} or more, or leave them out (--quick)."
        )
    wanted_s = before_s + took_s * max(max(tries, tried + 1) / tried for tries, tried in unknown)
    return f"By the sizes that were tried so far, --seconds {_rounded(wanted_s)} would do for all of these limits."


def _rounded(seconds: float) -> int:
    """Round up to two digits."""
    unit = int(10 ** max(0, len(str(math.ceil(seconds))) - 2))
    return math.ceil(seconds / unit) * unit


def _asked(choice: str, name: str, limits: Limits) -> _Question:
    """Start a process that looks for a limit."""
    ours, theirs = connection.Pipe(duplex=False)
    process = get_context("fork").Process(target=_answer, args=(limits, name, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Question(choice, name, process, ours)


def _heard(pipe: Connection) -> tuple[Answer | None, bool]:
    """Return an answer, if there is one, and whether it was the last one. Raises the error that a process sends."""
    try:
        answer, is_last = pipe.recv()
    except EOFError:  # the process has ended: what it has told remains
        return None, True
    if isinstance(answer, EppError):
        raise answer
    return answer, is_last


def _answer(limits: Limits, name: str, pipe: Connection) -> None:
    """Look for a limit, in a process of its own; send each answer, and whether it is the last."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    told = replace(limits, on_better=lambda found: pipe.send(((found, None), False)), tried=lambda: pipe.send((None, False)))
    asked: Callable[[], Answer] = told.questions()[name]
    try:
        pipe.send((asked(), True))
    except EppError as error:
        pipe.send((error, True))


def reach_table(reaches: Mapping[str, Reach]) -> list[str]:
    """Return lines with the limits of each choice."""
    found = list(reaches.values())
    rows = []
    if found[0].alone is not None:
        rows += [
            ["longest sequence, alone", *(_largest(reach.alone, "tokens") for reach in found)],
            ["longest sequence, with the others of the batch", *(_largest(reach.with_rest, "tokens") for reach in found)],
            ["most sequences of such lengths", *(_largest(reach.batch, "sequences") for reach in found)],
        ]
    rows.append(["smallest cap for this batch (--memory-gb)", *(_gigabytes(reach.cap) for reach in found)])
    if any(reach.cap_plan for reach in found):
        rows.append(["  makespan with it", *("" if (us := makespan_us(reach)) is None else format_us(us) for reach in found)])
    lines = table(("what fits", *reaches), rows)
    if found[0].alone is None:
        lines.append("Without a cap (--memory-gb, or a --cluster with memory) nothing is too long.")
    return lines


def makespan_us(reach: Reach) -> float | None:
    """Return the makespan of the plan with the smallest cap, in microseconds; None where there was no time for it."""
    return None if reach.cap_plan is None else reach.cap_plan.predicted.makespan_us


def _largest(limit: Limit | None, of_what: str) -> str:
    if limit is None or limit.value is None:
        return _LATE if limit == Limit(None) else "none fits"
    if limit.step > max(1, limit.value / _COARSE):
        return f"{limit.value:,} {of_what} or more, below {limit.value + limit.step:,}"
    return f"{limit.value:,} {of_what}" if limit.step else f"{limit.value:,} {of_what} or more"


def _gigabytes(limit: Limit) -> str:
    if limit.value is None:
        return _LATE
    return f"{format_gib(limit.value, decimals=4)}{' or less' if limit.step > limit.value / _COARSE else ''}"
