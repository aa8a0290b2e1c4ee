"""The step that answers whether plans are faster on these GPUs: the user's command, a few iterations with each schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_epp.plan.units import format_bytes
from megatron_epp.tools.cli.first_run.gain import refusals
from megatron_epp.tools.cli.first_run.outcome import FAILED, SKIPPED, Outcome, Setting
from megatron_epp.tools.cli.first_run.training import tiny_training
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.launch.runs import RecordedRun, TrainingError, launched, pipeline_size, train
from megatron_epp.tools.report.text import format_us, table

SCHEDULES = ("stock", "packed", "elastic")
_ITERATIONS = {False: 10, True: 7}
COUNTED = 4
"""Iterations at the end that count. Costs are learnt from the second to the fourth, and a plan is made two iterations before it
runs, so the seventh is the first that is planned by learnt costs."""


def race(setting: Setting) -> Outcome:
    """Train a few iterations with each schedule on the same documents, and compare what was measured with what was planned."""
    iterations = _ITERATIONS[setting.is_reduced]
    if setting.is_reduced:
        ranks, folder = pipeline_size(2), Path(setting.folder, "race")
        settings = tiny_training(folder, ranks, iterations, is_reduced=True)
        return _raced(setting, lambda name, own: train(own, ranks, settings | {"epp_schedule": name}, timeout_s=600.0))
    if not setting.has_launch:
        return Outcome(SKIPPED, ("there is no launch command",), "give yours behind --, with its data")
    if refused := refusals(setting.launch):
        return Outcome(FAILED, tuple(refused), "change these flags of your launch command, and run it again with --steps race")
    return _raced(setting, lambda name, own: launched(own, setting.launch.raced(name, own, iterations)))


def _raced(setting: Setting, run: Callable[[str, Path], RecordedRun]) -> Outcome:
    """Run every schedule, and compare the runs that end well: one may fail, for lack of memory for example."""
    recorded: dict[str, RecordedRun] = {}
    failures: dict[str, str] = {}
    for name in SCHEDULES:
        with progress(f"training with --epp-schedule {name}"):
            try:
                recorded[name] = run(name, Path(setting.folder, "race", name))
            except TrainingError as error:
                failures[name] = str(error)
    figures = {name: figures_of(run) for name, run in recorded.items()}
    lines = [*_rows(figures), *_said(figures), *(f"{name} did not end well: {text}" for name, text in failures.items())]
    todo = f"the logs are in {setting.folder / 'race'}; send them with this report"
    return Outcome.judged("elastic" in recorded, lines, todo, {"schedules": figures, "failures": failures})


def figures_of(run: RecordedRun) -> dict[str, Any]:
    """Return the figures of the iterations that count; peaks and retries are the largest of any rank in the whole run."""
    lines, times = run.lines[-COUNTED:], run.iteration_ms[-COUNTED:]
    planned = [line["makespan_us"] for line in lines if "makespan_us" in line]
    return {
        "tokens_per_second": 1e3 * sum(line["tokens"] for line in lines) / sum(times),
        "iteration_us": 1e3 * sum(times) / len(times),
        **{f"{name}_us": fmean(step[name] for step in planned) if planned else None for name in ("planned", "measured")},
        "planned_peak_bytes": _most(run, "planned_peak_bytes"),
        "device_peak_bytes": max((peak[0] for line in run.lines for peak in line["device_peak_bytes"] if peak), default=None),
        "alloc_retries": _most(run, "alloc_retries"),
        "losses": run.losses,
    }


def _most(run: RecordedRun, name: str) -> int | None:
    """Return the largest value of a figure of ranks; None where no iteration has it."""
    return max((value for line in run.lines for value in line.get(name, ()) if value is not None), default=None)


def _rows(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "tokens/s": ("tokens_per_second", "{:,.0f}".format),
        "iteration": ("iteration_us", format_us),
        "planned": ("planned_us", format_us),
        "measured": ("measured_us", format_us),
        "planned peak": ("planned_peak_bytes", format_bytes),
        "peak": ("device_peak_bytes", format_bytes),
        "allocator retries": ("alloc_retries", str),
    }

    def cells(own: Mapping[str, Any]) -> list[str]:
        return ["-" if own[key] is None else form(own[key]) for key, form in columns.values()]

    return table(("schedule", *columns), [[name, *cells(own)] for name, own in figures.items()]) if figures else []


def _said(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Say how plans compare with the other schedules, in speed and in losses."""
    if "elastic" not in figures:
        return []
    ours, lines = figures["elastic"], []
    for name, own in figures.items():
        if name != "elastic":
            difference = max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], own["losses"], strict=False))
            speed = ours["tokens_per_second"] / own["tokens_per_second"]
            lines.append(f"plans are {speed:.2f}x as fast as {name}; its losses differ by {difference:.1e} at most")
    lines.append(f"speeds and times are of the last {COUNTED} iterations, whose plans use learnt costs")
    return lines
