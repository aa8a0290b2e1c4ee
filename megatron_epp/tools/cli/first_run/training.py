"""The steps that train: a tiny model, whose losses must agree; the user's command, a few iterations with each schedule."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megatron_epp.launch.machine import NO_TF32, count_gpus, has_room_for
from megatron_epp.plan.units import format_bytes
from megatron_epp.tools.cli.first_run.checks import refusals
from megatron_epp.tools.cli.first_run.launch import FAILED, SKIPPED, Outcome, Setting
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.launch.runs import AS_MEGATRON, RecordedRun, TrainingError, launched, pipeline_size, tiny_gpt, train
from megatron_epp.tools.report.text import format_us, table

_LENGTHS = {False: (4096, 2500, 1800, 900, 700, 400, 300, 120), True: (120, 70, 31, 17, 9, 5)}
"""Tokens of the documents of a batch, in full and reduced."""
_ITERATIONS = {False: 5, True: 2}
_FP32_ALLOWED = 1e-5  # largest relative difference of a loss in fp32
_BF16_FLOOR = 1e-4  # difference of a loss in bf16 that is near enough however near Megatron's own is
TIMES = 2.0  # largest distance from the reference, as a multiple of the distance of Megatron's own run
SCHEDULES = ("stock", "packed", "elastic")
_RACED = {False: 10, True: 7}
COUNTED = 4
"""Iterations at the end that count. Costs are learnt from the second to the fourth, and a plan is made two iterations before it
runs, so the seventh is the first that is planned by learnt costs."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest relative differences from a reference over the iterations: of Megatron's own run and of ours, and what passes."""

    theirs: float
    ours: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.allowed


def deviation(exact: Sequence[float], theirs: Sequence[float], ours: Sequence[float], floor: float) -> Deviation:
    """Compare two runs with a reference; differences up to `floor` pass. That of what is not a number is infinite."""
    differences = (np.abs(np.divide(column, exact) - 1).max() for column in (theirs, ours))
    far = [math.inf if math.isnan(most) else float(most) for most in differences]
    return Deviation(far[0], far[1], max(TIMES * far[0], floor))


def parity(setting: Setting) -> Outcome:
    """Train from equal weights: losses equal to rounding in fp32, in bf16 as near to a run in fp32 as Megatron's own are."""
    # Numbers are compared, and no time: two ranks may share a GPU.
    folder, ranks, iterations = Path(setting.folder, "parity"), 2 if has_room_for(2) else 1, _ITERATIONS[setting.is_reduced]
    settings = tiny_training(folder, ranks, iterations, setting.is_reduced) | AS_MEGATRON
    runs: dict[str, dict[str, Any]] = {"stock": {"epp_schedule": "stock"}, "elastic": {"epp_slices": 3}}
    if settings.get("bf16"):
        runs["stock in fp32"] = {"epp_schedule": "stock", "bf16": False}
    losses = {}
    for name, changes in runs.items():
        with progress(f"training {iterations} iterations, {name}"):
            where, own = folder / name.replace(" ", "-"), settings | changes
            losses[name] = train(where, ranks, own, timeout_s=600.0, environment={} if own.get("bf16") else NO_TF32).losses
    exact, floor = losses.get("stock in fp32", losses["stock"]), _BF16_FLOOR if "stock in fp32" in losses else _FP32_ALLOWED
    difference = deviation(exact, losses["stock"], losses["elastic"], floor)
    todo = f"send this report with the logs in {folder}; `python -m scripts.parity` of a checkout compares single tensors"
    far = {"stock": difference.theirs, "elastic": difference.ours, "allowed": difference.allowed}
    return Outcome.judged(difference.holds, _lines(losses, difference, ranks), todo, {"losses": losses, "deviation": far})


def tiny_training(folder: Path, ranks: int, iterations: int, is_reduced: bool) -> dict[str, Any]:
    lengths = _LENGTHS[is_reduced]
    sizes = dict.fromkeys(("seq_length", "max_position_embeddings"), max(lengths)) | {"global_batch_size": len(lengths)}
    return tiny_gpt(
        data_path=_documents(folder, lengths, iterations + 1),
        train_iters=iterations,
        lr_warmup_iters=1,
        pipeline_model_parallel_size=ranks,
        epp_documents="truncate",
        **sizes,
    )


def _lines(losses: dict[str, list[float]], difference: Deviation, ranks: int) -> list[str]:
    iterations = enumerate(zip(*losses.values(), strict=True), start=1)
    rows = [[str(number), *(f"{value:.7f}" for value in row)] for number, row in iterations]
    exact = "Megatron's run in fp32" if "stock in fp32" in losses else "Megatron's run"
    shared = ", which share a GPU" if 0 < count_gpus() < ranks else ""
    most = f"{difference.ours:.1e} (allowed {difference.allowed:.1e})"
    said = f"on {ranks} pipeline ranks{shared}; largest difference of the elastic run's loss from {exact}: {most}"
    return [*table(("iteration", *losses), rows, left=()), said]


def _documents(folder: Path, lengths: Sequence[int], copies: int) -> str:
    """Write text documents of given numbers of trained positions, prepare them as byte-level tokens, and return the prefix."""
    from megatron_epp.mcore.data.prepare import prepare

    texts = folder / "texts"
    shutil.rmtree(texts, ignore_errors=True)
    texts.mkdir(parents=True)
    letters = np.random.RandomState(0)
    for number, length in enumerate(tuple(lengths) * copies):  # Megatron asks for more documents than it trains on
        (texts / f"{number:04}.txt").write_bytes(bytes(letters.randint(97, 123, length).tolist()))
    prefix = folder / "documents"
    prepare([texts], prefix)
    return str(prefix)


def race(setting: Setting) -> Outcome:
    iterations = _RACED[setting.is_reduced]
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
    recorded, failures = dict[str, RecordedRun](), dict[str, str]()
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
        **{name: (f"{name}_us", format_us) for name in ("iteration", "planned", "measured")},
        "planned peak": ("planned_peak_bytes", format_bytes),
        "peak": ("device_peak_bytes", format_bytes),
        "allocator retries": ("alloc_retries", str),
    }
    ways = columns.values()
    rows = [[name, *("-" if own[key] is None else form(own[key]) for key, form in ways)] for name, own in figures.items()]
    return table(("schedule", *columns), rows) if figures else []


def _said(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
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
