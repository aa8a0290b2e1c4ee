"""Ranks of a queue check of which one takes part in no plan."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_epp.plan.communicators import directions
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups
from megatron_epp.runtime.tools.queue_check import run_rank


def with_a_silent_rank(rank, plans, width, gpus, limit_s, folder):
    """Run the plans on every rank but the last, which opens its links and then sends nothing."""
    last = dist.get_world_size() - 1
    if rank < last:
        return run_rank(rank, plans, width, gpus, limit_s, folder)
    links = Links.create(
        range(last + 1), range(last + 1), Groups(timedelta(seconds=60)), directions(*(one.placement for one in plans))
    )
    links.connect(torch.device("cpu"))
    links.control.from_each(None)
    time.sleep(60)  # it is killed when the others have ended
    return []
