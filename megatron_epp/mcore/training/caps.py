"""Memory that plans may fill: on this rank's device, and in host memory."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence

import torch

from megatron_epp.cost.memory import DEVICE_SHARE, SETUP_MARGIN_BYTES, room_bytes
from megatron_epp.plan import UNLIMITED_BYTES, EppError, InfeasibleError
from megatron_epp.runtime.offload.host import host_limit

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_HOST_SHARE = 0.8
"""Default share of the host's memory that all ranks of a node may use together; the rest is left to the system and data."""


def wanted_cap_bytes(args: argparse.Namespace) -> int:
    """Return the cap in bytes that the run sets, else `DEVICE_SHARE` of this rank's device; unlimited without a GPU."""
    if args.epp_memory_cap_gb is not None:
        return int(args.epp_memory_cap_gb * _GIB)
    if torch.cuda.is_initialized():
        return int(DEVICE_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return UNLIMITED_BYTES


def cap_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of this rank's memory that plans may fill: the wanted cap, and on a GPU at most the available memory.

    Call it after set-up, when the memory of the CUDA context, communicators and libraries is already in use.
    """
    wanted = wanted_cap_bytes(args)
    if not torch.cuda.is_initialized():
        return wanted
    free, _ = torch.cuda.mem_get_info()
    return min(wanted, room_bytes(free, torch.cuda.memory_reserved()))


def possible_on_device(error: EppError) -> EppError:
    """Return the error without the advice to raise the cap if that would be above the memory of this rank's device."""
    if not isinstance(error, InfeasibleError) or not torch.cuda.is_initialized():
        return error
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return error.without("cap_bytes") if error.least_cap_bytes > total_bytes else error


def tell_lowered(args: argparse.Namespace, caps: Sequence[int]) -> None:
    """Log that devices have less room (`caps`, bytes by rank) than wanted, as a warning if the run set the cap explicitly."""
    wanted = wanted_cap_bytes(args)
    if min(caps) >= wanted:
        return
    asked = args.epp_memory_cap_gb is not None
    logger.log(
        logging.WARNING if asked else logging.INFO,
        "%s, %.2f GiB, is more than devices have left after set-up: plans fill %s GiB on pipeline ranks 0 to %d (free memory "
        "and what torch has reserved, less %.2f GiB)",
        "--epp-memory-cap-gb" if asked else f"The default cap, {100 * DEVICE_SHARE:.0f}% of the device's memory",
        wanted / _GIB,
        ", ".join(f"{cap / _GIB:.2f}" for cap in caps),
        len(caps) - 1,
        SETUP_MARGIN_BYTES / _GIB,
    )


def host_cap_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of host memory that this rank may use for offload."""
    if args.epp_host_memory_gb is not None:
        return int(args.epp_host_memory_gb * _GIB)
    limit_bytes, source = host_limit()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share_bytes = _HOST_SHARE * limit_bytes / ranks
    if args.rank == 0:
        logger.info(
            "--epp-offload may take %.1f GiB per rank: %.0f%% of %s, for %d ranks",
            share_bytes / _GIB,
            100 * _HOST_SHARE,
            source,
            ranks,
        )
    return int(share_bytes)
