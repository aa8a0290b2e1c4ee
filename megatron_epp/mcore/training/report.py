"""Reports of planned and measured figures of each iteration."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.cost import balance as spread
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore import features
from megatron_epp.mcore.training import loggers as loggers
from megatron_epp.mcore.training.session import Session
from megatron_epp.plan import Plan
from megatron_epp.plan.layout import layout_flag
from megatron_epp.planner.memory.account import account_of
from megatron_epp.planner.service.replica_balance import imbalance
from megatron_epp.report.facts import copies_us, host_peak_bytes, kv_offload_bytes, offload_share, recompute_share
from megatron_epp.report.measured import Measured
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.links.links import from_each
from megatron_epp.runtime.offload.activations import Offload
from megatron_epp.runtime.out_of_memory import Usage, device_peak, device_usage
from megatron_epp.runtime.trace import Recorder

_BATCHES = 10
"""Number of logged iterations whose lengths are taken as typical of the run."""


def layout_words(layers: Sequence[int]) -> str:
    """Format the flag that gives every stage its number of layers."""
    return f"--pipeline-model-parallel-layout '{layout_flag(layers)}'"


@dataclass(slots=True)
class IterationReport:
    """Figures of one iteration, collected on every rank.

    The first rank writes them to `--epp-report-dir`; the last passes them to Megatron's log and writers. Without that flag,
    only iterations that Megatron logs, or writes to a writer, are collected.
    """

    session: Session
    batch: GlobalBatch
    iteration: int
    is_evaluation: bool
    collects: bool
    start_s: float
    plan_wait_us: float
    recorder: Recorder = field(default_factory=Recorder)
    saved: SavedTensors | None = None
    offload: Offload | None = None

    @staticmethod
    def begin(session: Session, batch: GlobalBatch, forward_only: bool) -> IterationReport:
        """Start the report of an iteration, which the session counts in training. An evaluation step is not reported."""
        args = session.args
        if not forward_only:
            session.iteration += 1
        due = loggers.is_due(args, session.iteration)
        collects = (args.epp_report_dir is not None or (due and batch.plan is not None)) and not forward_only
        now_s = time.perf_counter()
        return IterationReport(session, batch, session.iteration, forward_only, collects, now_s, session.plan_wait_us)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the iteration: a context around all that builds or frees graphs."""
        self.recorder = Recorder(enabled=self.collects or (self.session.records and not self.is_evaluation))
        copies = () if self.batch.plan is None else self.batch.plan.copies
        if (self.session.args.epp_measure_memory or any(copies)) and not self.is_evaluation:
            stages, vocabulary = self.session.stages.values(), self.session.vocabulary
            parameters = chain.from_iterable(stage.parameters for stage in stages)

            def others() -> int:
                of_shard = 0 if vocabulary is None else vocabulary.num_bytes
                return sum(stage.relay.num_bytes for stage in stages) + of_shard

            self.saved = SavedTensors(parameters, others)
            self.offload = None if self.session.host is None else Offload(self.saved, self.session.host)
        with self.saved or contextlib.nullcontext():
            yield

    def usage(self, static_bytes: int) -> Usage | None:
        """Return the bytes currently in use on this rank; on a CPU they are known only if saved tensors are counted."""
        if self.saved is None or torch.cuda.is_initialized():
            return device_usage(static_bytes)
        return Usage(static_bytes + self.saved.held_bytes)

    def finish(self, loss: torch.Tensor | None) -> None:
        """Gather the ranks' figures, log them, append a line to ``iterations.jsonl``, and write plan and trace if requested.

        `loss` is ``[sum, tokens]`` on the last rank, None elsewhere.
        """
        if not self.collects:
            return
        events = self.recorder.events()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the host is ahead: the clock would miss what it has only issued
        elapsed_us, planned_us = (time.perf_counter() - self.start_s) * 1e6, None
        if loss is not None:
            loss = loss.detach().clone().double()
            dist.all_reduce(loss, group=mpu.get_data_parallel_group(with_context_parallel=True))
            planned_us = self._of_replicas(loss)
        mine: dict[str, Any] = {
            "events": events,
            "wait_us": self.recorder.wait_us,
            "peak": self.saved.peak_bytes if self.saved is not None else None,
            "device_peak": device_peak(),
            "host_peak": 0 if self.session.host is None else self.session.host.held_peak_bytes,
            "loss": None if loss is None else loss.tolist(),
            "elapsed_us": elapsed_us,
            "planned_us": planned_us,
            "plan_wait_us": self.plan_wait_us,
        }
        assert self.session.links is not None
        everyone = from_each(mine, self.session.links.reports)
        first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
        if not (first or last):
            return
        measured = None
        if self.batch.plan is not None:
            measured = Measured.of(self.batch.plan, (entry["events"] for entry in everyone), self.batch.plan_digest)
        line = self._line(everyone, measured)
        if self.session.report_folder is not None:
            self.session.report_folder.write(self.iteration, line, self.batch.plan, measured)
        if last and measured is not None:
            self._log(line)

    def _of_replicas(self, like: torch.Tensor) -> list[float] | None:
        """Gather the planned makespan of every replica, in microseconds; a collective call of all replicas' last ranks."""
        if self.batch.plan is None:
            return None
        planned_us = like.new_tensor([self.batch.plan.predicted.makespan_us])
        everyone = [torch.empty_like(planned_us) for _ in range(self.session.replicas)]
        dist.all_gather(everyone, planned_us, group=mpu.get_data_parallel_group())
        return torch.cat(everyone).tolist()

    def _line(self, everyone: list[dict[str, Any]], measured: Measured | None) -> dict[str, Any]:
        loss_sum, num_tokens = next(entry["loss"] for entry in reversed(everyone) if entry["loss"] is not None)
        line = {
            "iteration": self.iteration,
            "schedule": self.session.args.epp_schedule,
            "loss": loss_sum / max(1.0, num_tokens),
            "sequences": len(self.batch.lengths),
            "tokens": sum(self.batch.lengths),
            "elapsed_us": max(entry["elapsed_us"] for entry in everyone),
            "peak_activation_bytes": [entry["peak"] for entry in everyone],
            "device_peak_bytes": [entry["device_peak"] for entry in everyone],
        }
        if self.batch.plan is None or measured is None:
            return line
        line |= {"planning_us": self.batch.planning_us, "plan_wait_us": max(entry["plan_wait_us"] for entry in everyone)}
        planned_us = next(entry["planned_us"] for entry in reversed(everyone) if entry["planned_us"] is not None)
        line |= {"replicas": self.session.replicas, "imbalance": imbalance(planned_us)}
        line |= {"host_peak_bytes": [entry["host_peak"] for entry in everyone]}
        return line | _planned_line(self.batch.plan, measured) | {"wait_us": [entry["wait_us"] for entry in everyone]}

    def _log(self, line: dict[str, Any]) -> None:
        args = self.session.args
        if self.iteration % args.log_interval == 0:
            self._log_memory()
            loggers.log(line)
            self._log_spread()
        if self.iteration % args.tensorboard_log_interval == 0:
            loggers.write(line)

    def _log_memory(self) -> None:
        """Log the parts of the planned peaks, once per run, before the first iteration's line."""
        session, plan = self.session, self.batch.plan
        if plan is not None and session.costs is not None and not session.memory_is_told:
            session.memory_is_told = True
            loggers.log_memory(account_of(plan, session.costs), self.iteration)

    def _log_spread(self) -> None:
        """Log a hint if another division of layers among stages would reduce waiting, once, after `_BATCHES` iterations.

        Models whose layers differ from each other get no such hint.
        """
        session, plan = self.session, self.batch.plan
        if plan is None or session.costs is None or len(session.batches_seen) == _BATCHES:
            return
        if getattr(session.args, "hybrid_layer_pattern", None) or getattr(session.args, "moe_layer_freq", 1) != 1:
            return
        session.batches_seen.append(plan.lengths)
        if len(session.batches_seen) == _BATCHES:
            lengths = list(chain.from_iterable(session.batches_seen))
            if hint := spread.advice(session.costs, plan.placement, lengths, layout_words):
                loggers.log_hint(hint)


def _planned_line(plan: Plan, measured: Measured) -> dict[str, Any]:
    padded = sum(plan.padded_tokens(c) for c in range(len(plan.chunks)))
    return {
        "chunks": len(plan.chunks),
        "makespan_us": {"planned": plan.predicted.makespan_us, "measured": measured.makespan_us},
        "bubble_fraction": {"planned": plan.predicted.bubble_fraction, "measured": measured.bubble_fraction},
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


def count_tokens(batch: GlobalBatch) -> None:
    """Pass the true lengths to Megatron's throughput log, which otherwise assumes `--seq-length` tokens per sequence."""
    count = features.sequence_length_counter()
    if count is not None:
        ends = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int64)
        if torch.cuda.is_initialized():  # Megatron adds up on the GPU, and would wait for a copy of ordinary memory
            ends = ends.pin_memory().to("cuda", non_blocking=True)
        count(ends)
