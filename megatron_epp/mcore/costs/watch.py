"""Comparison of every training iteration with its plan: a stage that stays slower than its costs is named in the log."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist

from megatron_epp.cost.slowness import ITERATIONS, SlowStages, slowed_us
from megatron_epp.plan import Plan
from megatron_epp.runtime.links.objects import ObjectGroup
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.side_thread import SideThread

logger = logging.getLogger(__name__)


class StageWatch:
    """Watches the stages of a pipeline, in a thread. All ranks that run the same plans call `after` in the same iterations.

    The first rank of `group`, which are those and nothing else uses, writes the log.
    """

    def __init__(self, rank: int, group: ObjectGroup) -> None:
        self._rank, self._group = rank, group
        self._stages = SlowStages()
        self._thread = SideThread("epp-stage-watch")  # its collectives are on `group`, which no other thread uses
        self._last: Future[None] | None = None
        self._seen = 0
        self._told: set[tuple[int, int]] = set()

    def after(self, plan: Plan, recorder: Recorder) -> None:
        """Begin to compare an iteration. Waits for the previous comparison, and raises its error."""
        self.complete()
        self._last = self._thread.submit(partial(self._compare, plan, recorder))

    def complete(self, limit_s: float | None = None) -> None:
        """Wait until the last iteration is compared. Raises the error of that, or `TimeoutError` after `limit_s` seconds."""
        if self._last is not None:
            self._last.result(limit_s)

    def _compare(self, plan: Plan, recorder: Recorder) -> None:
        """Add an iteration, when the device has its times; every `ITERATIONS` iterations a collective call."""
        self._stages.add(plan, self._rank, recorder.took_us())
        self._seen += 1
        if self._seen % ITERATIONS == 0:
            everyone = self._group.from_each((dist.get_rank(), socket.gethostname(), self._stages.slow))
            if self._group.is_first:
                self._tell(plan, everyone)

    def _tell(self, plan: Plan, everyone: list[tuple[int, str, dict[int, float]]]) -> None:
        """Name slow stages that have not been named since they became slow."""
        slow = {(rank, stage): (host, ratio) for rank, host, ratios in everyone for stage, ratio in ratios.items()}
        new, self._told = slow.keys() - self._told, set(slow)
        if not new:
            return
        named = []
        for rank, stage in sorted(new):
            host, ratio = slow[rank, stage]
            named.append(
                f"rank {rank} on {host} takes {ratio:.2f} of the time of its costs for stage {stage} ("
                f"{slowed_us(plan, {stage: ratio}) / 1e3:.1f} ms an iteration by the plan, "
                f"{plan.predicted.makespan_us / 1e3:.1f} ms without)"
            )
        logger.warning("slower than costs for %d iterations: %s", ITERATIONS, "; ".join(named))
