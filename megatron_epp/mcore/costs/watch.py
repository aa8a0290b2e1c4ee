"""Comparison of every training iteration with its plan: a stage that stays slower than its costs is named in the log."""

from __future__ import annotations

import logging
import socket

import torch.distributed as dist

from megatron_epp.cost.slowness import ITERATIONS, SlowStages, slowed_us
from megatron_epp.plan import Plan
from megatron_epp.runtime.links.links import from_each
from megatron_epp.runtime.trace import Recorder

logger = logging.getLogger(__name__)


class StageWatch:
    """Watches the stages of a pipeline. All ranks of a group that runs the same plans call `after` in the same iterations.

    Args:
        rank: pipeline rank of this process.
        group: a CPU group of all ranks that run the same plans; its first rank writes the log.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self._rank, self._group = rank, group
        self._stages = SlowStages()
        self._last: tuple[Plan, Recorder] | None = None
        self._seen = 0
        self._told: set[tuple[int, int]] = set()

    def after(self, plan: Plan, recorder: Recorder) -> None:
        """Add an iteration. Its times are read an iteration later, when a device has them; a collective call now and then."""
        if self._last is not None:
            then, times = self._last
            self._stages.add(then, self._rank, times.took_us())
        self._last = plan, recorder
        self._seen += 1
        if self._seen % ITERATIONS == 0:
            everyone = from_each((dist.get_rank(), socket.gethostname(), self._stages.found), self._group)
            if dist.get_rank(self._group) == 0:
                self._tell(plan, everyone)

    def _tell(self, plan: Plan, everyone: list[tuple[int, str, dict[int, float]]]) -> None:
        """Name slow stages that have not been named since they became slow."""
        slow = {(rank, stage): (host, ratio) for rank, host, found in everyone for stage, ratio in found.items()}
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
