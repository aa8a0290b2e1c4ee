"""Offload in a run: its host memory, its limit and the time of its copies, and what it does around a plan's actions."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_epp.cost.line_fits import fit_line
from megatron_epp.features.offload.activations import ActivationOffload, OwnedTensors, movable_share
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory, host_limit
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.costs.memory_probe import bytes_chunk
from megatron_epp.mcore.costs.probe import forward
from megatron_epp.mcore.costs.sources import gathered
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Op, Plan, Recompute
from megatron_epp.plan.kv_offload import host_peak_bytes
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.recompute import MODES
from megatron_epp.runtime.executor import Handler
from megatron_epp.runtime.links.objects import from_each_of_job
from megatron_epp.runtime.timer import time_host_copies

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_HOST_SHARE = 0.8
"""Default share of the host's memory that all ranks of a node may use together; the rest is left to the system and data. Not
measured: how much these need depends on the machine and the data.
"""
_COPIED_BYTES = (1 << 20, 1 << 25)
"""Sizes of the copies that are timed: two, for the latency and the rate of a line. Other sizes were not compared."""


class RankOffload(RunFeature):
    """Offload of one rank of a run."""

    host: HostMemory | None = None
    """Host memory that receives activations and caches; None before `settled`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._offload: ActivationOffload | None = None

    def measured(self, costs: PipelineCosts) -> PipelineCosts:
        run = self._run
        run.note("measuring what can go to the host")
        if run.makes_chunks:
            share = min(map(measure_offloadable_share, run.stages.values()))
            costs = replace(costs, offloadable_share=min(gathered(share, run.links)))
            if run.args.epp_costs != "learn" and not math.isinf(costs.host_us_per_byte):
                return costs
        latency_us, us_per_byte = map(max, zip(*gathered(measure_host_link(run.device), run.links, max), strict=True))
        return replace(costs, host_latency_us=latency_us, host_us_per_byte=us_per_byte)

    def settled(self, costs: PipelineCosts) -> None:
        run, cap_bytes = self._run, host_cap_bytes(self._run.args)
        run.problem = replace(run.problem, host_cap_bytes=min(from_each_of_job(cap_bytes)))
        self.host = HostMemory(run.device, cap_bytes)

    def counting(self, plan: Plan, parameters: Iterable[Tensor], others: Callable[[], int]) -> ActivationOffload | None:
        self._offload, whole = None, not self._run.makes_chunks
        if self.host is not None and (whole or any(plan.copies)):
            self._offload = ActivationOffload(self.host, parameters, others, measures_shares=whole)
        return self._offload

    def running(
        self, plan: Plan, inputs: Any, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> AbstractContextManager[Mapping[Op, Handler]]:
        assert self.host is not None  # since `settled`
        offload = None if plan.forward_only else self._offload  # which is that of the last training iteration
        return offload_handlers(plan, self._run.rank, self._run.stages, self.host, offload, handlers)

    def report(self, line: dict[str, Any], plan: Plan | None, measured: Measured | None) -> None:
        if plan is not None:
            line["planned_host_peak_bytes"] = host_peak_bytes(plan)

    @property
    def figures(self) -> Mapping[str, Any]:
        shares = None if self._offload is None else self._offload.shares
        share = {} if shares is None else {"offloadable_share": min(shares, default=0.0)}
        return {"host_peak": 0 if self.host is None else self.host.held_peak_bytes} | share


def measure_offloadable_share(stage: MegatronStage) -> float:
    """Share of the bytes a chunk keeps whose storage nothing else holds (0 to 1): the smallest over all recompute modes."""
    if not stage.has_gradient:
        return 1.0  # it keeps nothing
    shares = []
    for recompute in (NO_RECOMPUTE, *(Recompute(**{name: stage.num_layers}) for name in MODES)):
        with OwnedTensors(stage.parameters) as saved:
            with saved.of((0, 0)):
                _, output, _ = forward(stage, bytes_chunk(stage), recompute=recompute)
            shares.append(movable_share(saved.pop((0, 0))))
            del output
    return min(shares)


def measure_host_link(device: torch.device) -> tuple[float, float]:
    """Measure copies to the host and back, on a CPU in its memory: latency in microseconds, and microseconds per byte."""
    line = fit_line(time_host_copies(device, _COPIED_BYTES), pairs=False).line
    return line.fixed_us, line.per_token_us


def host_cap_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of host memory that this rank may use for offload."""
    if args.epp_host_memory_gb is not None:
        return int(args.epp_host_memory_gb * _GIB)
    limit_bytes, source = host_limit()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share_bytes = _HOST_SHARE * limit_bytes / ranks
    if args.rank == 0:
        facts = names_of(args)["offload"], share_bytes / _GIB, 100 * _HOST_SHARE, source, ranks
        logger.info("%s may take %.1f GiB per rank: %.0f%% of %s, for %d ranks", *facts)
    return int(share_bytes)
