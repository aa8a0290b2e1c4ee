"""Reports of iterations: a thread that makes them, and what last ranks have for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.runtime.links.objects import Groups, ObjectGroup, from_each_of_job
from megatron_epp.runtime.side_thread import SideThread

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
