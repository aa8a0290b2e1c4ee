"""What lasts from iteration to iteration: costs, communicators, the stage, and how plans are made from lengths."""

from __future__ import annotations

import argparse
import functools
import logging
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp import planner
from megatron_epp.cost.stage import PipelineCosts
from megatron_epp.mcore.args import token_multiple
from megatron_epp.mcore.costs import pipeline_costs
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.planner.problem import UNLIMITED_BYTES, Options, Problem
from megatron_epp.runtime.links import Links
from megatron_epp.runtime.program import prepare
from megatron_epp.runtime.watchdog import Watchdog
from megatron_epp.schedule import EppError, Plan

logger = logging.getLogger(__name__)

_LONGEST = 8
"""Lengths that an error names."""
_PLANS_KEPT = 64
"""Plans kept for batches of exactly the same lengths: documents are often all cut to the context."""


class Session:
    """One process's share of an elastic training run.

    Made before the data iterators, which plan in the background with `plan_training` and `plan_evaluation`; those wait until
    `attach` has seen the model and knows its costs.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.iteration = args.iteration
        self.watchdog = Watchdog(args.epp_wait_limit_seconds)
        self.rank = mpu.get_pipeline_model_parallel_rank()
        self.num_ranks = mpu.get_pipeline_model_parallel_world_size()
        self.stage: MegatronStage | None = None
        self.links: Links | None = None
        self.costs: PipelineCosts | None = None
        self.plan_wait_us = 0.0
        """How long the last batch was waited for."""
        self._costs_known = threading.Event()
        self._planning_us: dict[int, float] = {}
        self._planned = functools.lru_cache(maxsize=_PLANS_KEPT)(self._plan)

    def attach(self, model: torch.nn.Module, config: Any) -> MegatronStage:
        """Wrap the model and learn its costs, at the first call; later calls return the same stage."""
        if self.stage is None:
            last = self.num_ranks - 1
            self.stage = MegatronStage(
                model, config, self.rank == 0, self.rank == last, mpu.get_tensor_model_parallel_world_size()
            )
            pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
            self.links = Links.create(pipeline, _replica())
            if self.args.epp_schedule == "elastic":
                self.costs = pipeline_costs(self.args, self.stage, self.links, self.rank)
                self._costs_known.set()
        return self.stage

    def plan_training(self, lengths: tuple[int, ...]) -> Plan:
        """The plan for one replica's share of a training batch."""
        return self._planned(lengths, False)

    def plan_evaluation(self, lengths: tuple[int, ...]) -> Plan:
        """The plan for one replica's share of an evaluation batch."""
        return self._planned(lengths, True)

    def _plan(self, lengths: tuple[int, ...], forward_only: bool) -> Plan:
        self._costs_known.wait()
        assert self.costs is not None
        args = self.args
        problem = Problem(
            lengths=lengths,
            placement=tuple(range(self.num_ranks)),
            cap_bytes=(self._cap_bytes(),) * self.num_ranks,
            token_multiple=token_multiple(args),
            forward_only=forward_only,
        )
        recompute = args.epp_recompute if args.epp_recompute == "auto" else int(args.epp_recompute)
        options = Options(
            chunk_tokens=args.epp_chunk_tokens,
            slices=args.epp_slices,
            recompute=recompute,
            planner=args.epp_planner,
            split_weight=args.epp_split_weight_gradient,
        )
        start_s = time.perf_counter()
        try:
            plan = planner.plan(problem, self.costs, options)
        except EppError as error:
            raise type(error)(f"{error}\nThe batch that this is about has {_summary(lengths)}.") from error
        prepare(plan, self.rank)  # here, beside the running iteration: the executor finds it done
        self._planning_us[id(plan)] = (time.perf_counter() - start_s) * 1e6
        return plan

    def planning_us(self, plan: Plan | None) -> float:
        """How long a plan took to make. Known once; afterwards zero."""
        return self._planning_us.pop(id(plan), 0.0)

    def _cap_bytes(self) -> int:
        if self.args.epp_memory_cap_gb is not None:
            return int(self.args.epp_memory_cap_gb * 2**30)
        if torch.cuda.is_initialized():
            return int(0.9 * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
        return UNLIMITED_BYTES


def _replica() -> list[int]:
    """Global ranks that run the same plan: those of this data-parallel rank. Every rank of the job must call this."""
    replicas: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, mpu.get_data_parallel_rank())
    return [rank for rank, replica in enumerate(replicas) if replica == mpu.get_data_parallel_rank()]


def _summary(lengths: tuple[int, ...]) -> str:
    """``8 sequences of 39 to 7,172 tokens, 12,345 in all, the longest 7172, 3001, 988``."""
    longest = ", ".join(map(str, sorted(lengths, reverse=True)[:_LONGEST]))
    spread = f"{min(lengths, default=0):,} to {max(lengths, default=0):,} tokens"
    return f"{len(lengths)} sequences of {spread}, {sum(lengths):,} in all, the longest {longest}"


_session: Session | None = None


def start(args: argparse.Namespace) -> Session:
    """Make the process's session (again)."""
    global _session
    _session = Session(args)
    return _session


def current() -> Session:
    """The process's session. Raises `EppError` when `start` was not called."""
    if _session is None:
        raise EppError("no elastic run was started: train through megatron.training.pretrain with --epp")
    return _session
