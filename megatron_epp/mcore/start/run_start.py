"""Links, costs and caps of a run: what the ranks of a job settle with each other before its first iteration."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any, get_args

import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.features import targets
from megatron_epp.mcore.arguments.layout import token_multiple, token_shards
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.costs.sources import Step
from megatron_epp.mcore.iteration.base_run import NOTHING_TRAINS, Run, num_trained
from megatron_epp.mcore.model.stage import own_device
from megatron_epp.mcore.training.caps import agreed_caps, offloads
from megatron_epp.mcore.training.nccl_settings import groups_in_use, link_options, reduce_once, time_limit
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.problem import Problem
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups

logger = logging.getLogger(__name__)

_STEPS = len(get_args(Step.__value__))


def connect(run: Run, stages: dict[int, Any]) -> None:
    """Make the groups over which these stages of the rank exchange messages, and the run's features."""
    run.stages, run.device = stages, own_device()
    pipeline = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    used = directions(run.placement.rank_of)
    # Megatron's function lists the groups whose time limit --distributed-timeout-seconds-after-init changes.
    run.groups, run.link_options = Groups(time_limit(run.args), mpu.create_group), link_options(run.args, used)
    run.links = Links.create(pipeline, run.own_ranks, run.groups, used, run.link_options)
    run.trained = {number: num_trained(stage) for number, stage in stages.items()}
    everyone = run.links.control.from_each([number for number, count in run.trained.items() if count])
    first = min(itertools.chain(*everyone), default=run.placement.num_stages)
    if not run.makes_chunks and first == run.placement.num_stages and dist.get_rank() == 0:
        logger.warning(NOTHING_TRAINS)  # samples ask in every call
    for number, stage in stages.items():
        stage.has_gradient = number >= first
    run.reports.connect(run.groups, run.rank == run.placement.num_ranks - 1)
    run.features = tuple(filter(None, (make(run) for make in targets(run.asked, "run"))))


def use_communicators(run: Run) -> None:
    """Use every communicator once, so that caps on memory, which follow, count what they have allocated."""
    with run.watching("waits for others to meet"):
        run.links.connect(run.device)
        # Megatron's too: some are used for the first time only in the optimizer's step, when caps have been settled.
        reduce_once(groups_in_use(run.args), run.device)
        for feature in run.features:
            feature.allocate()


def settle(run: Run, prior: Callable[[Callable[[Step], None]], PipelineCosts]) -> None:
    """Settle costs and caps with all ranks, and prepare features.

    `prior` gives costs by formula or from a file; it is given a function to call with each of its steps beforehand. A rank that
    waits for others does not know their steps, so it waits for the sum of all steps' limits.
    """
    limit_s = run.watchdog.limit_s

    def text() -> str:
        limit = f"{_STEPS * limit_s:g} s, {limit_s:g} s for each of {_STEPS} steps ({run.watchdog.limit_name})"
        return f"rank {run.rank} has been {run.step} for {limit}"

    with run.watchdog.watch(text, lambda: run.step, _STEPS * limit_s):
        try:
            costs = prior(run.note)
            run.note("looking for learnt costs")
            for feature in run.features:
                costs = feature.costs(costs)
            run.costs = costs
            run.note("exchanging memory caps")
            run.options = options_from(run.args, training=True, offload=offloads(run.args))
            multiple = (token_multiple if run.makes_chunks else token_shards)(run.args)
            run.problem = Problem((), run.placement.rank_of, agreed_caps(run.args, run.links.position), multiple)
            for feature in run.features:
                feature.settled(costs)
        finally:
            run.step = None  # where the watch ends
