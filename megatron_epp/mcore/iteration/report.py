"""Reports of planned and measured figures of each iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration import loggers
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.loggers import ReplicaFigures
from megatron_epp.mcore.iteration.schedule_call import is_replay
from megatron_epp.plan import Plan
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.plan_figures import copies_us, kv_offload_bytes, offload_share, recompute_share
from megatron_epp.plan.problem import imbalance
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.links.objects import gathered_by
from megatron_epp.runtime.memory_use import device_peak, device_retries
from megatron_epp.runtime.recorder import Recorder, elapsed_us, mark

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.device_inputs import BatchInputs


class ReportedBatch(Protocol):
    """A replica's batch as reports show it: lengths, and their plan, with its digest and the time of making it."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def plan_digest(self) -> str: ...
    @property
    def planning_us(self) -> float: ...


NOTHING: Any = SimpleNamespace(lengths=(), plan=None, plan_digest="", planning_us=0.0)


@dataclass(slots=True)
class IterationReport:
    """Figures of one iteration, collected on every rank.

    The first rank writes them to `--epp-report-dir`; the last passes them to the log and to Megatron's writers. Without that
    flag, only iterations that are shown are collected. A thread does the work while the next iteration runs.
    """

    run: Run
    batch: ReportedBatch
    iteration: int
    collects: bool
    start: Any
    recorder: Recorder
    saved: SavedTensors | None = None
    """Tensors that stages keep for backward; None if they are not counted."""

    @staticmethod
    def begin(run: Run, batch: ReportedBatch, forward_only: bool) -> IterationReport:
        """Start the report of an iteration, and count it if it trains. An evaluation step is not reported."""
        args = run.args
        if not forward_only and not is_replay():
            run.iteration += 1
        due = args.epp_schedule == "elastic" and loggers.is_due(args, run.iteration)
        collects = (args.epp_report_dir is not None or due) and not forward_only
        start = mark() if collects else None
        recorder = Recorder(enabled=collects or (not forward_only and any(feature.reads_times for feature in run.features)))
        return IterationReport(run, batch, run.iteration, collects, start, recorder)

    def count_saved_tensors(self, uploaded: torch.Tensor, forward_only: bool) -> None:
        """Count what stages of documents keep besides inputs, if memory is measured or a feature needs it."""
        run, plan = self.run, self.batch.plan
        if forward_only:
            return
        stages = run.stages.values()

        def other_bytes() -> int:
            return sum(stage.kv_cache.num_bytes for stage in stages) + sum(feature.num_bytes for feature in run.features)

        parameters = chain((uploaded,), chain.from_iterable(stage.parameters for stage in stages))  # read where they count
        self.saved = run.counting(plan, parameters, run.args.epp_measure_memory, other_bytes)

    def log_previous_and_begin(self, loss: torch.Tensor | None) -> None:
        """Log the iteration before, whose report has been made meanwhile, and have a thread begin this iteration's report.

        The last iteration's report is completed at once, because the writers are closed soon after it. `loss` is
        ``[sum, tokens, ...]`` on the last rank; None elsewhere, and where the caller's step has its loss.
        """
        run, reports = self.run, self.run.reports
        with run.watching("waits for others' figures"):
            reports.complete()
            if self.collects:
                figures = {
                    "wait_us": self.recorder.wait_us,
                    "peak": None if self.saved is None else self.saved.peak_bytes,
                    "device_peak": device_peak(),
                    "retries": device_retries(),
                    "plan_wait_us": run.plan_wait_us,
                } | run.figures
                costs = None if self.batch.plan is None else run.costs
                reports.begin(partial(self.report, figures, mark(), loss, costs))
            if self.iteration >= run.args.train_iters:
                reports.complete()
                if run.totals.iterations:
                    loggers.line_of(run.names)(loggers.end_text(self.iteration, run.totals, run.args.epp_report_dir))
                    run.totals = loggers.Totals()  # evaluation may follow, without a line

    def report(
        self, figures: dict[str, Any], end: Any, loss: torch.Tensor | None, costs: PipelineCosts | None
    ) -> Callable[[], None] | None:
        """Gather the ranks' figures, append a line to ``iterations.jsonl``, and write plan and trace if requested.

        A collective call of the pipeline, in the thread of reports. `costs` are those of the plan, and `loss` is as in
        `log_previous_and_begin`. Returns a function that logs the iteration, on the last rank.
        """
        run, plan = self.run, self.batch.plan
        own = figures | {"events": self.recorder.events(), "elapsed_us": elapsed_us(self.start, end)}
        if run.rank == run.placement.num_ranks - 1:
            planned_us = 0.0 if plan is None else plan.predicted.makespan_us
            # The device has computed the loss, since it has reached `end`.
            loss_sum, loss_tokens, *_ = (None, 0.0) if loss is None else loss.tolist()
            sizes = len(self.batch.lengths), sum(self.batch.lengths)
            mine = ReplicaFigures(run.replica, *sizes, planned_us, loss_sum, loss_tokens)
            own["replicas"] = run.reports.from_last_ranks(mine)
        is_logged = plan is not None and loggers.is_due(run.args, self.iteration)
        last = dist.get_world_size() - 1
        readers = [0] * (run.args.epp_report_dir is not None) + [last] * is_logged
        ranks = gathered_by(readers, own, run.links.figures)
        if ranks is None:
            return None
        measured = None if plan is None else Measured.of(self.batch.plan_digest, (entry["events"] for entry in ranks))
        line = self._line(ranks, measured)
        for feature in run.features:
            feature.report(line, plan, measured)
        if not is_logged or dist.get_rank() != last:
            return None
        hint = ""
        if plan is not None and costs is not None and self.iteration % run.args.log_interval == 0:
            hint = next(filter(None, (feature.hint(plan, costs) for feature in run.features)), "")
        log = partial(self._log, line, hint)
        if run.names is TRAINING:
            return log
        log()  # Python's loggers may be used in any thread, and a program's next call may be far
        return None

    def _line(self, ranks: list[dict[str, Any]], measured: Measured | None) -> dict[str, Any]:
        last_ranks: list[ReplicaFigures] = next(entry["replicas"] for entry in reversed(ranks) if "replicas" in entry)
        replicas = {figures.replica: figures for figures in last_ranks}.values()  # context-parallel ranks have one batch
        losses = [figures.loss_sum for figures in last_ranks if figures.loss_sum is not None]
        line = {
            "iteration": self.iteration,
            "schedule": self.run.args.epp_schedule,
            **({"loss": sum(losses) / max(1.0, sum(figures.loss_tokens for figures in last_ranks))} if losses else {}),
            "sequences": sum(figures.sequences for figures in replicas),
            "tokens": sum(figures.tokens for figures in replicas),
            "elapsed_us": max(entry["elapsed_us"] for entry in ranks),
            "peak_activation_bytes": [entry["peak"] for entry in ranks],
            "device_peak_bytes": [entry["device_peak"] for entry in ranks],
            "alloc_retries": [entry["retries"] for entry in ranks],
        }
        if self.batch.plan is None or measured is None:
            return line
        line |= {"planning_us": self.batch.planning_us, "plan_wait_us": max(entry["plan_wait_us"] for entry in ranks)}
        line |= {"replicas": self.run.replicas, "imbalance": imbalance([figures.planned_us for figures in replicas])}
        line |= {"host_peak_bytes": [entry.get("host_peak", 0) for entry in ranks]}
        return line | _planned_line(self.batch.plan, measured) | {"wait_us": [entry["wait_us"] for entry in ranks]}

    def _log(self, line: dict[str, Any], hint: str) -> None:
        run, args, say = self.run, self.run.args, loggers.line_of(self.run.names)
        if self.iteration % args.log_interval == 0:
            if run.peak_text:
                say(run.peak_text)
                run.peak_text = ""
            say(loggers.iteration_text(line, "" if self.run.loss is None else self.run.loss.name))
            self.run.totals = self.run.totals.after(line)
            if hint:
                say(f"epp hint | {hint}")
        if loggers.is_written(args, self.iteration):
            loggers.write(line)


def _planned_line(plan: Plan, measured: Measured) -> dict[str, Any]:
    padded = sum(plan.padded_tokens(c) for c in range(len(plan.chunks)))
    return {
        "chunks": len(plan.chunks),
        "makespan_us": {"planned": plan.predicted.makespan_us, "measured": measured.makespan_us},
        "bubble_fraction": {"planned": plan.predicted.bubble_fraction, "measured": measured.bubble_fraction},
        "planned_peak_bytes": list(plan.predicted.peak_bytes),
        "planned_peak_activation_bytes": [
            peak - static for peak, static in zip(plan.predicted.peak_bytes, plan.static_bytes, strict=True)
        ],
        "recompute_share": recompute_share(plan),
        "recompute_us": sum(map(sum, plan.recompute_us)),
        "copies_us": copies_us(plan),
        "offload_share": offload_share(plan),
        "kv_offload_bytes": kv_offload_bytes(plan),
        "shared_tokens": plan.num_shared_tokens,
        "planned_host_peak_bytes": [0] * plan.num_ranks,
        "padding_share": 1 - plan.num_tokens / padded,
    }


def count_tokens(inputs: BatchInputs) -> None:
    """Pass the true lengths to Megatron's throughput log, which otherwise assumes `--seq-length` tokens per sequence."""
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    update_seqlen_stats_from_cu_seqlens(inputs.sequence_ends)  # which adds up on the device
