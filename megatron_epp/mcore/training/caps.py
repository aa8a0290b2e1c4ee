"""How much of the device plans may fill, on this rank."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

import torch

from megatron_epp.cost.memory import DEVICE_SHARE, SETUP_MARGIN_BYTES, room_bytes
from megatron_epp.plan import UNLIMITED_BYTES

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def wanted_cap_bytes(args: argparse.Namespace) -> int:
    """What the run asks for, or else the usual share of this rank's device; without a device no limit."""
    if args.epp_memory_cap_gb is not None:
        return int(args.epp_memory_cap_gb * _GIB)
    if torch.cuda.is_initialized():
        return int(DEVICE_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return UNLIMITED_BYTES


def cap_bytes(args: argparse.Namespace) -> int:
    """What plans may fill of this rank's memory: what is wanted, and on a GPU no more than is there.

    To be asked after set-up: what the CUDA context, communicators and libraries have taken by then is gone.
    """
    wanted = wanted_cap_bytes(args)
    if not torch.cuda.is_initialized():
        return wanted
    free, _ = torch.cuda.mem_get_info()
    return min(wanted, room_bytes(free, torch.cuda.memory_reserved()))


def tell_lowered(args: argparse.Namespace, caps: Sequence[int]) -> None:
    """Say where devices have less room than the run wants: as a warning where it has asked for so much.

    Args:
        args: Megatron's arguments.
        caps: in bytes, of every pipeline rank.
    """
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
