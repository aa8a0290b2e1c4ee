"""NCCL: which groups use it, and the options of groups that carry messages between a pipeline's ranks.

A kernel that waits for the other rank holds a streaming multiprocessor (SM) for each of its thread blocks (CTAs), by default 16
for a message of more than 1 MiB over NVLink. Eight links of a rank could then hold nearly all SMs of a device, and compute and
collectives, which other ranks may have to finish before they send, would not start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.plan.communicators import Direction, link_ctas, most_links
from megatron_epp.runtime.links.objects import GroupOptions, from_each_of_job

_CONFIG = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
"""Settings of a communicator that are passed to NCCL by the same name."""


def uses_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if a group (default: of all ranks) takes tensors on GPUs to NCCL, whatever its backend for tensors on CPU."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",")).get("cuda") == "nccl"


def smallest_device(used: Sequence[Direction]) -> tuple[int, int]:
    """Return the links of a rank, and the SMs of the smallest device, on which ranks must agree. A collective call."""
    own_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return most_links(used), min(from_each_of_job(own_sms))


def link_defaults(num_links: int, num_sms: int) -> dict[str, Any]:
    """Return the settings of a link's communicator, where a rank has `num_links` on a device with `num_sms` SMs."""
    # High priority: a message starts ahead of thread blocks of compute that wait for a multiprocessor.
    return {"is_high_priority_stream": True, "max_ctas": link_ctas(num_links, num_sms)}


def options_of(settings: Mapping[str, Any], limit: timedelta | None = None) -> GroupOptions:
    """Return a factory of options by Megatron's `--nccl-communicator-config-path`, with a time limit, or torch's default."""

    def make() -> Any:
        # New ones at every call: torch writes the group's name and ranks into them.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=settings.get("is_high_priority_stream", False))
        for name in _CONFIG:
            if name in settings:
                setattr(options.config, name, settings[name])
        if limit is not None:
            options._timeout = limit
        return options

    return make
