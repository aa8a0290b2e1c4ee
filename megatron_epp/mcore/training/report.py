"""Reports of planned and measured figures of each iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost import balance as spread
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore import features
from megatron_epp.mcore.arguments.layout import hybrid_pattern
from megatron_epp.mcore.training import loggers as loggers
from megatron_epp.mcore.training.inputs import BatchInputs
from megatron_epp.mcore.training.reports import ReplicaFigures
from megatron_epp.mcore.training.session import Session
from megatron_epp.plan import Plan
from megatron_epp.plan.account import Account
from megatron_epp.plan.layout import layout_flag
from megatron_epp.planner.memory.account import account_of
from megatron_epp.planner.service.replica_balance import imbalance
from megatron_epp.report.facts import copies_us, host_peak_bytes, kv_offload_bytes, offload_share, recompute_share
from megatron_epp.report.measured import Measured
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.links.objects import gathered_by
from megatron_epp.runtime.offload.activations import ActivationOffload
from megatron_epp.runtime.out_of_memory import Usage, device_peak, device_retries, device_usage
from megatron_epp.runtime.trace import Recorder, elapsed_us, mark

_BATCHES = 10
"""Number of logged iterations whose lengths are taken as typical of the run. Not measured."""


def layout_words(predictions: int, layers: Sequence[int]) -> str:
    """Format the flag that gives every stage its number of layers, and the last so many of multi-token prediction."""
    return f"--pipeline-model-parallel-layout '{layout_flag(layers, predictions)}'"


@dataclass(slots=True)
class IterationReport:
    """Figures of one iteration, collected on every rank.

    The first rank writes them to `--epp-report-dir`; the last passes them to Megatron's log and writers. Without that flag,
    only iterations that Megatron logs, or writes to a writer, are collected. Times are read, gathered and written in a thread
    while the next iteration runs.
    """

    session: Session
    batch: GlobalBatch
    iteration: int
    is_evaluation: bool
    collects: bool
    start: Any
    plan_wait_us: float
    recorder: Recorder = field(default_factory=Recorder)
    saved: SavedTensors | None = None
    offload: ActivationOffload | None = None

    @staticmethod
    def begin(session: Session, batch: GlobalBatch, forward_only: bool) -> IterationReport:
        """Start the report of an iteration, and count it if it trains. An evaluation step is not reported."""
        args = session.args
        if not forward_only:
            session.iteration += 1
        due = loggers.is_due(args, session.iteration)
        collects = (args.epp_report_dir is not None or (due and batch.plan is not None)) and not forward_only
        start = mark() if collects else None
        return IterationReport(session, batch, session.iteration, forward_only, collects, start, session.plan_wait_us)

    @contextlib.contextmanager
    def measuring(self, uploaded: torch.Tensor) -> Iterator[None]:
        """Measure the iteration: a context around all that builds or frees graphs.

        Args:
            uploaded: memory of the batch's inputs, which are on the device throughout and not counted with a chunk.
        """
        self.recorder = Recorder(enabled=self.collects or (self.session.records and not self.is_evaluation))
        copies = () if self.batch.plan is None else self.batch.plan.copies
        if (self.session.args.epp_measure_memory or any(copies)) and not self.is_evaluation:
            stages, vocabulary = self.session.stages.values(), self.session.vocabulary
            parameters = chain.from_iterable(stage.parameters for stage in stages)

            def others() -> int:
                of_shard = 0 if vocabulary is None else vocabulary.num_bytes
                return sum(stage.relay.num_bytes for stage in stages) + of_shard

            self.saved = SavedTensors([*parameters, uploaded], others)
            self.offload = None if self.session.host is None else ActivationOffload(self.saved, self.session.host)
        with self.saved or contextlib.nullcontext():
            yield

    def usage(self, static_bytes: int) -> Usage | None:
        """Return the bytes currently in use on this rank; on a CPU they are known only if saved tensors are counted."""
        if self.saved is None or torch.cuda.is_initialized():
            return device_usage(static_bytes)
        return Usage(static_bytes + self.saved.held_bytes)

    def finish(self, loss: torch.Tensor | None) -> None:
        """Log the earlier iteration whose report has been made meanwhile, and begin this iteration's report.

        The last iteration's report is completed at once, because the writers are closed soon after it. `loss` is
        ``[sum, tokens, ...]`` on the last rank, None elsewhere.
        """
        session, reports = self.session, self.session.reports
        with session.watching("waits for others' figures"):
            reports.complete()
            if not self.collects:
                return
            figures = {
                "wait_us": self.recorder.wait_us,
                "peak": self.saved.peak_bytes if self.saved is not None else None,
                "device_peak": device_peak(),
                "retries": device_retries(),
                "host_peak": 0 if session.host is None else session.host.held_peak_bytes,
                "plan_wait_us": self.plan_wait_us,
            }
            reports.begin(partial(self.report, figures, mark(), loss, session.costs))
            if self.iteration >= session.args.train_iters:
                reports.complete()

    def report(
        self, figures: dict[str, Any], end: Any, loss: torch.Tensor | None, costs: PipelineCosts | None
    ) -> Callable[[], None] | None:
        """Gather the ranks' figures, append a line to ``iterations.jsonl``, and write plan and trace if requested.

        A collective call of the pipeline, in the thread of reports.

        Args:
            loss: ``[sum, tokens]`` on the last rank, None elsewhere.
            costs: by which the batch was planned.

        Returns:
            function that logs the iteration, on the last rank.
        """
        session, plan = self.session, self.batch.plan
        mine = figures | {"events": self.recorder.events(), "elapsed_us": elapsed_us(self.start, end)}
        if loss is not None:  # the device has computed it, since it has reached `end`
            planned_us = 0.0 if plan is None else plan.predicted.makespan_us
            loss_sum, num_tokens, *_ = loss.tolist()
            of_replica = ReplicaFigures(session.replica, loss_sum, num_tokens, planned_us)
            mine["replicas"] = session.reports.from_last_ranks(of_replica)
        is_logged = plan is not None and loggers.is_due(session.args, self.iteration)
        last = dist.get_world_size() - 1
        readers = [0] * (session.args.epp_report_dir is not None) + [last] * is_logged
        everyone = gathered_by(readers, mine, session.links.figures)
        if everyone is None:
            return None
        measured = None
        if plan is not None:
            measured = Measured.of(plan, (entry["events"] for entry in everyone), self.batch.plan_digest)
        line = self._line(everyone, measured)
        if session.report_folder is not None:
            session.report_folder.write(self.iteration, line, plan, measured)
        return partial(self._log, line, *self._notes(costs)) if is_logged and dist.get_rank() == last else None

    def _line(self, everyone: list[dict[str, Any]], measured: Measured | None) -> dict[str, Any]:
        replicas = next(entry["replicas"] for entry in reversed(everyone) if "replicas" in entry)
        loss_sum, num_tokens = sum(one.loss_sum for one in replicas), sum(one.num_tokens for one in replicas)
        line = {
            "iteration": self.iteration,
            "schedule": self.session.args.epp_schedule,
            "loss": loss_sum / max(1.0, num_tokens),
            "sequences": len(self.batch.lengths),
            "tokens": sum(self.batch.lengths),
            "elapsed_us": max(entry["elapsed_us"] for entry in everyone),
            "peak_activation_bytes": [entry["peak"] for entry in everyone],
            "device_peak_bytes": [entry["device_peak"] for entry in everyone],
            "alloc_retries": [entry["retries"] for entry in everyone],
        }
        if self.batch.plan is None or measured is None:
            return line
        planned_us = {one.replica: one.planned_us for one in replicas}  # a replica's context-parallel ranks have one plan
        line |= {"planning_us": self.batch.planning_us, "plan_wait_us": max(entry["plan_wait_us"] for entry in everyone)}
        line |= {"replicas": self.session.replicas, "imbalance": imbalance(list(planned_us.values()))}
        line |= {"host_peak_bytes": [entry["host_peak"] for entry in everyone]}
        return line | _planned_line(self.batch.plan, measured) | {"wait_us": [entry["wait_us"] for entry in everyone]}

    def _log(self, line: dict[str, Any], account: Account | None, hint: str) -> None:
        args = self.session.args
        if self.iteration % args.log_interval == 0:
            if account is not None:
                loggers.log_memory(account, self.iteration)
            loggers.log(line, "" if self.session.loss is None else self.session.loss.name)
            if hint:
                loggers.log_hint(hint)
        if self.iteration % args.tensorboard_log_interval == 0:
            loggers.write(line)

    def _notes(self, costs: PipelineCosts | None) -> tuple[Account | None, str]:
        """Return what is logged once per run: the planned peaks by item, and a hint about the division of layers."""
        if self.batch.plan is None or costs is None or self.iteration % self.session.args.log_interval:
            return None, ""
        account = None if self.session.memory_is_told else account_of(self.batch.plan, costs)
        self.session.memory_is_told = True
        return account, self._hint(self.batch.plan, costs)

    def _hint(self, plan: Plan, costs: PipelineCosts) -> str:
        """Return a hint, once, if other layers per stage would have reduced waiting in the first `_BATCHES` iterations.

        Models whose layers differ from each other get no such hint.
        """
        session = self.session
        if len(session.batches_seen) == _BATCHES:
            return ""
        if hybrid_pattern(session.args) or getattr(session.args, "moe_layer_freq", 1) != 1:
            return ""
        session.batches_seen.append(plan.lengths)
        if len(session.batches_seen) < _BATCHES:
            return ""
        words = partial(layout_words, getattr(session.args, "mtp_num_layers", None) or 0)
        return spread.advice(costs, plan.placement, list(chain.from_iterable(session.batches_seen)), words) or ""


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
        "planned_host_peak_bytes": host_peak_bytes(plan),
        "padding_share": 1 - plan.num_tokens / padded,
    }


def count_tokens(inputs: BatchInputs) -> None:
    """Pass the true lengths to Megatron's throughput log, which otherwise assumes `--seq-length` tokens per sequence."""
    count = features.sequence_length_counter()
    if count is not None:  # which adds up on the device
        count(inputs.sequence_ends)
