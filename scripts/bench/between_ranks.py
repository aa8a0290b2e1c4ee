"""Reports of iterations by ranks that exchange their figures over gloo, as a training makes them."""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration.report import IterationReport
from megatron_epp.mcore.iteration.report_folder import Log, ReportFolder, Reports
from megatron_epp.plan import UNLIMITED_BYTES, Plan
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups

ROUNDS = 7
ITERATION_S = 1.0
"""Time of an iteration in seconds, in which reports are made while the training thread sleeps."""
COLUMNS = "made by the training thread", "in a thread: training thread", "thread of reports"


def report_times_ms(rank: int, plan: Plan, plan_digest: str) -> tuple[float, ...]:
    """Return the processor times of a rank's reports by `COLUMNS`, in milliseconds; medians of `ROUNDS` iterations."""
    mpu.initialize_model_parallel(pipeline_model_parallel_size=plan.num_ranks)
    everyone, last = range(plan.num_ranks), plan.num_ranks - 1
    groups = Groups()
    args = Namespace(epp_schedule="elastic", log_interval=1, tensorboard_log_interval=1, train_iters=UNLIMITED_BYTES)
    run = Namespace(args=args, links=Links.create(everyone, everyone, groups), replicas=1, replica=0, rank=rank)
    run.host, run.costs, run.loss, run.plan_wait_us, run.iteration = None, None, None, 0.0, 0
    run.placement, run.names, run.cuts_documents = Namespace(num_ranks=plan.num_ranks), TRAINING, False
    run.watching = lambda what: contextlib.nullcontext()
    batch = Namespace(plan=plan, plan_digest=plan_digest, lengths=plan.lengths, planning_us=0.0)
    times_s: tuple[list[float], ...] = ([], [], [])
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args.epp_report_dir = folder
        run.report_folder = ReportFolder(Path(folder), "bench") if rank == 0 else None
        for column, run.reports in enumerate((_Inline(), _Timed(times_s[2]))):
            run.reports.connect(groups, is_last=rank == last)
            for _ in range(ROUNDS):
                report = IterationReport.begin(run, batch, forward_only=False)
                report.recorder.begin()
                for step in plan.ranks[rank]:
                    with report.recorder.action(step.action):
                        pass
                dist.barrier()
                start_s = time.thread_time()
                report.log_previous_and_begin(torch.ones(2) if rank == last else None)
                times_s[column].append(time.thread_time() - start_s)
                time.sleep(ITERATION_S)
            run.reports.complete()
    return tuple(1e3 * statistics.median(times) for times in times_s)


class _Inline(Reports):
    """Reports made by the training thread."""

    def begin(self, work: Callable[[], Log | None]) -> None:
        if (log := work()) is not None:
            log()


class _Timed(Reports):
    """Reports that note the processor time of their thread."""

    def __init__(self, times_s: list[float]) -> None:
        super().__init__()
        self._times_s = times_s

    def begin(self, work: Callable[[], Log | None]) -> None:
        def timed() -> Log | None:
            start_s = time.thread_time()
            log = work()
            self._times_s.append(time.thread_time() - start_s)
            return log

        super().begin(timed)
