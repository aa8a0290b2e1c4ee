"""Output of an iteration's figures: the thread that makes reports, lines in Megatron's log, its writers under ``epp/``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.plan.errors import Names
from megatron_epp.plan.plan_figures import main_items
from megatron_epp.runtime.links.objects import Groups, ObjectGroup, from_each_of_job
from megatron_epp.runtime.side_thread import SideThread

logger = logging.getLogger(__name__)

_MS, _GIB = 1e3, 2**30


Log = Callable[[], None]
"""Function that writes a report's lines to Megatron's log and the loggers."""


class ReplicaFigures(NamedTuple):
    """Figures of an iteration on one of a replica's last ranks, each of which has the losses of its part of the tokens:
    `loss_sum`, which is divided by `loss_tokens`, and is None where the caller's step has the loss.
    """

    replica: int
    sequences: int
    tokens: int
    planned_us: float
    loss_sum: float | None
    loss_tokens: float


class Reports:
    """The reports of a run, made in a thread, so that training waits neither for the device nor for other ranks' figures.

    At most one is under way. It is made with collectives on groups that nothing else uses, so every rank must begin the same
    reports in the same order. The training thread writes its lines at the next iteration: TensorBoard and W&B are not made for
    threads, and W&B drops figures of earlier steps.
    """

    def __init__(self) -> None:
        self._last_ranks: ObjectGroup | None = None
        self._thread: SideThread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._under_way: Future[Log | None] | None = None

    def connect(self, groups: Groups, is_last: bool) -> None:
        """Connect the last ranks of all replicas, which have the loss. All ranks of the job must call this together."""
        # Replicas and context-parallel ranks: each of them has the loss of its own tokens, tensor-parallel ranks have the same.
        own = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
        of_last_ranks = [ranks for ranks in from_each_of_job(own if is_last else None) if ranks is not None]
        self._last_ranks = ObjectGroup.create(own if is_last else of_last_ranks[0], groups)

    def from_last_ranks(self, mine: ReplicaFigures) -> list[ReplicaFigures]:
        """Return the figures of all last ranks of all replicas. A collective call of these, in the thread of reports."""
        assert self._last_ranks is not None
        return self._last_ranks.from_each(mine)

    def begin(self, work: Callable[[], Log | None]) -> None:
        """Complete this report, and begin another on its own stream. `work` may return a call for the training thread."""
        self.complete()
        if self._thread is None:
            self._thread = SideThread("epp-reports")
            # On the default stream, copies to the host would wait for the next iteration, which is launched meanwhile.
            self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None
        self._under_way = self._thread.submit(partial(_on_stream, self._stream, work))

    def complete(self, limit_s: float | None = None) -> None:
        """Wait for the present report, and write its lines. Raises its error, or `TimeoutError` after `limit_s` seconds."""
        begun, self._under_way = self._under_way, None
        if begun is not None and (log := begun.result(limit_s)) is not None:
            log()


def _on_stream(stream: torch.cuda.Stream | None, work: Callable[[], Log | None]) -> Log | None:
    with torch.cuda.stream(stream):
        return work()


def is_due(args: argparse.Namespace, iteration: int) -> bool:
    """True if Megatron's log, or a writer of the last rank, shows an iteration; the same on all ranks."""
    return iteration % args.log_interval == 0 or is_written(args, iteration)


def is_written(args: argparse.Namespace, iteration: int) -> bool:
    has_writer = bool(getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None))
    return has_writer and iteration % args.tensorboard_log_interval == 0


def line_of(names: Names) -> Callable[[str], None]:
    """Return what writes a line to the log of who started the run: Megatron's, or Python's where a program has its own loop."""
    if names is not TRAINING:
        return logger.info
    from megatron.training.utils import print_rank_last  # which a program without Megatron's loop may lack

    return print_rank_last


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """Return names and values for the writers, of an iteration's figures as `IterationReport` collects them, with a plan."""
    values: dict[str, float] = {}
    for source in ("planned", "measured"):
        values[f"epp/{source} makespan (ms)"] = line["makespan_us"][source] / _MS
        values[f"epp/{source} bubble"] = line["bubble_fraction"][source]
    values["epp/planned peak activations (GiB)"] = max(line["planned_peak_activation_bytes"]) / _GIB
    measured = [peak for peak in line["peak_activation_bytes"] if peak is not None]
    if measured:
        values["epp/measured peak activations (GiB)"] = max(measured) / _GIB
    if any(line["planned_host_peak_bytes"]):
        values["epp/planned peak host memory (GiB)"] = max(line["planned_host_peak_bytes"]) / _GIB
        values["epp/measured peak host memory (GiB)"] = max(line["host_peak_bytes"]) / _GIB
    if line["replicas"] > 1:
        values["epp/planned imbalance of replicas"] = line["imbalance"]
    if devices := [peak for peak in line["device_peak_bytes"] if peak is not None]:
        for name, peaks in zip(("allocated", "reserved"), zip(*devices, strict=True), strict=True):
            values[f"epp/{name} peak so far (GiB)"] = max(peaks) / _GIB
    return values | {
        "epp/planning (ms)": line["planning_us"] / _MS,
        "epp/waiting for the plan (ms)": line["plan_wait_us"] / _MS,
        "epp/chunks": line["chunks"],
        "epp/recompute share": line["recompute_share"],
        "epp/offload share": line["offload_share"],
        "epp/padding share": line["padding_share"],
        "epp/waiting for messages (ms)": max(line["wait_us"]) / _MS,
        "epp/tokens": line["tokens"],
    }


def write(line: dict[str, Any]) -> None:
    """Pass the figures to this rank's writers (Megatron gives them to the last rank only)."""
    from megatron.training import global_vars

    values, iteration = scalars(line), line["iteration"]
    if (tensorboard := global_vars.get_tensorboard_writer()) is not None:
        for name, value in values.items():
            tensorboard.add_scalar(name, value, iteration)
    if (wandb := global_vars.get_wandb_writer()) is not None:
        wandb.log(values, iteration)


def iteration_text(line: dict[str, Any], loss: str = "") -> str:
    """Return the line of an iteration; with a loss's name its value, that Megatron shows only above 0."""
    makespan, bubble = line["makespan_us"], line["bubble_fraction"]
    parts = [
        f"epp iteration {line['iteration']}",
        *([f"{loss}: {line['loss']:.6g}"] if loss else []),
        f"makespan (ms): {makespan['planned'] / _MS:.1f} planned, {makespan['measured'] / _MS:.1f} measured",
        f"bubble: {bubble['planned']:.1%} planned, {bubble['measured']:.1%} measured",
        f"chunks: {line['chunks']}",
        f"peak activations (GiB): {_peaks(line)}",
        f"planning (ms): {line['planning_us'] / _MS:.1f}, waiting for it: {line['plan_wait_us'] / _MS:.1f}",
        f"waiting for messages (ms): {max(line['wait_us']) / _MS:.1f}",
        f"recompute: {line['recompute_share']:.1%} ({line['recompute_us'] / _MS:.1f} ms)",
        f"padding: {line['padding_share']:.1%}",
        f"tokens: {line['tokens']:,} in {line['sequences']:,} sequences",
    ]
    if any(line["planned_host_peak_bytes"]):
        parts.append(f"offload: {line['offload_share']:.1%} ({line['copies_us'] / _MS:.1f} ms overlapped with compute)")
    if line.get("shared_tokens"):
        parts.append(f"tokens shared: {line['shared_tokens']:,}")
    if line.get("kv_offload_bytes"):
        parts.append(f"KV offload (GiB): {line['kv_offload_bytes'] / _GIB:.3g}")
    if line["replicas"] > 1:
        parts.append(f"imbalance of {line['replicas']} replicas: {line['imbalance']:.1%} planned")
    return " | ".join(parts)


class Totals(NamedTuple):
    """Sums over logged iterations: their number, their tokens, and their measured bubble fractions."""

    iterations: int = 0
    tokens: int = 0
    bubbles: float = 0.0

    def after(self, line: dict[str, Any]) -> Totals:
        return Totals(self.iterations + 1, self.tokens + line["tokens"], self.bubbles + line["bubble_fraction"]["measured"])


def end_text(iteration: int, totals: Totals, report_dir: str | None) -> str:
    """Return the last line of a run that has logged some iteration."""
    parts = [
        f"epp run has ended after iteration {iteration}",
        f"logged iterations: {totals.iterations:,} with {totals.tokens:,} tokens",
        f"mean bubble of these: {totals.bubbles / totals.iterations:.1%} measured",
        *([] if report_dir is None else [f"reports: {report_dir}"]),
    ]
    return " | ".join(parts)


def memory_text(peak_bytes: Sequence[int], items: dict[str, int], iteration: int) -> str:
    """Return a line with the planned peaks by rank and the parts of the highest one, its `items`."""
    sizes = " ".join(f"{peak / _GIB:.3g}" for peak in peak_bytes)
    return (
        f"epp memory planned for iteration {iteration} | peak per pipeline rank (GiB): {sizes} | "
        f"rank {peak_bytes.index(max(peak_bytes))}: {main_items(items)}"
    )


def _peaks(line: dict[str, Any]) -> str:
    measured = [peak for peak in line["peak_activation_bytes"] if peak is not None]
    planned = f"{max(line['planned_peak_activation_bytes']) / _GIB:.3g} planned"
    return f"{planned}, {max(measured) / _GIB:.3g} measured" if measured else planned
