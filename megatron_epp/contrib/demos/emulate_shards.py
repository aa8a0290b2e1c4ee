"""Emulation of vocabulary shards: collectives carry the times at which their inputs were ready, as messages do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.plan import Action, Op, Plan
from megatron_epp.runtime.executor import Executor, Handler


class Clock(Protocol):
    """Rank of an emulation, as `emulate.EmulatedRank`."""

    plan: Plan
    rank: int
    scale: float
    ended_s: dict[Action, float]

    def perform(self, action: Action, arrived_s: float) -> float: ...


class WaitingShards:
    """Handlers of `S`, `N`, `T` and their collectives by timed waits.

    Args:
        spread, gather: communicators of all ranks, one for each collective.
    """

    def __init__(self, rank: Clock, spread: dist.ProcessGroup, gather: dist.ProcessGroup) -> None:
        self._rank, self._spread_group, self._gather_group = rank, spread, gather
        self._moving: dict[tuple[Op, int], tuple[dist.Work | None, Tensor]] = {}

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers for `Executor`."""
        return {Op.SPREAD: self._spread, Op.GATHER: self._gather, Op.S: self._after, Op.N: self._after, Op.T: self._after}

    def _spread(self, executor: Executor, action: Action) -> None:
        plan, chunk = self._rank.plan, action.chunk
        ended_s = self._rank.ended_s.get(Action(Op.F, plan.num_stages - 1, chunk), 0.0)
        when = torch.tensor([ended_s], dtype=torch.float64)
        work = dist.broadcast(when, plan.placement[-1], group=self._spread_group, async_op=True)
        self._moving[Op.SPREAD, chunk] = work, when

    def _gather(self, executor: Executor, action: Action) -> None:
        own = Action(Op.S, self._rank.rank, action.chunk)
        when = torch.tensor([self._rank.ended_s[own]], dtype=torch.float64)
        work = dist.all_reduce(when, dist.ReduceOp.MAX, group=self._gather_group, async_op=True)
        self._moving[Op.GATHER, action.chunk] = work, when

    def _after(self, executor: Executor, action: Action) -> None:
        """Run an action when the collective before it has brought its input."""
        carried = Op.SPREAD if action.op is Op.S else Op.GATHER
        work, when = self._moving[carried, action.chunk]
        if work is not None:
            work.wait()
            self._moving[carried, action.chunk] = None, when
        times_us = self._rank.plan.messages.collective_times(carried)
        moved_us = times_us[action.chunk] if times_us else 0.0
        self._rank.perform(action, float(when[0]) + moved_us * self._rank.scale * 1e-6)
