"""Memory that plans may fill on this rank's device.

The free memory of a device after set-up varies. The optimizer's states make no difference, since they are in memory that torch
has reserved; but a resumed run has loaded them by then, and with them kernels whose memory a first run has not allocated yet.
So caps are kept with checkpoints.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_epp.cost.memory import DEVICE_SHARE, KEPT_CAP_SLACK_BYTES, SETUP_MARGIN_BYTES, room_bytes
from megatron_epp.mcore.arguments.flag import GIVEN
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.costs.stored import keep_file, kept_file
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.reading import read_text
from megatron_epp.runtime.links.objects import from_each_of_job, made_by_first

logger = logging.getLogger(__name__)

FILE_NAME = "epp_caps.json"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Caps:
    wanted_bytes: int
    cap_bytes: tuple[int, ...]


_FORMAT = FileFormat("caps", "megatron-epp/caps", 1, Codec(least_of_others=0))


def wanted_cap_bytes(args: argparse.Namespace) -> int:
    """Return the cap in bytes that the run sets, else `DEVICE_SHARE` of this rank's device; unlimited without a GPU."""
    if args.epp_memory_cap_gb is not None:
        return int(args.epp_memory_cap_gb * _GIB)
    if torch.cuda.is_initialized():
        return int(DEVICE_SHARE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return UNLIMITED_BYTES


def agreed_caps(args: argparse.Namespace, position: int) -> tuple[int, ...]:
    """Return the caps in bytes of all pipeline ranks, the smallest of any replica. A collective call of all ranks of the job.

    If the loaded checkpoint has caps, they are used where devices have about as much free memory now. The first rank keeps the
    caps with this run's checkpoints.
    """
    saved_caps = made_by_first(partial(_kept, args))
    everyone = from_each_of_job((position, cap_bytes(args, saved_caps[position] if saved_caps else None)))
    caps = tuple(min(cap for at, cap in everyone if at == number) for number in range(args.pipeline_model_parallel_size))
    if args.rank == 0:
        tell_lowered(args, caps)
    if torch.cuda.is_initialized():
        keep_file(args, FILE_NAME, _FORMAT.write(_Caps(wanted_cap_bytes(args), caps)) + "\n")
    return caps


def _kept(args: argparse.Namespace) -> tuple[int, ...] | None:
    """Return the caps that are kept with the loaded checkpoint; None if there are none, or that run wanted another cap."""
    if (path := kept_file(args, FILE_NAME)) is None or not torch.cuda.is_initialized():
        return None
    try:
        saved = _FORMAT.parse(_Caps, read_text(path))
    except (EppError, OSError, UnicodeDecodeError) as error:
        logger.warning(
            "%s cannot be read (%s): caps follow from free memory, so plans may differ from the run before", path, error
        )
        return None
    holds = len(saved.cap_bytes) == args.pipeline_model_parallel_size and saved.wanted_bytes == wanted_cap_bytes(args)
    return saved.cap_bytes if holds else None


def cap_bytes(args: argparse.Namespace, saved_bytes: int | None = None) -> int:
    """Return the bytes of this rank's memory that plans may fill: the wanted cap, and on a GPU at most the available memory.

    Call it after set-up, when the memory of the CUDA context, communicators and libraries is already in use. The cap of the
    previous run, `saved_bytes`, is used if the available memory is nearly the same.
    """
    wanted = wanted_cap_bytes(args)
    if not torch.cuda.is_initialized():
        return wanted
    free, _ = torch.cuda.mem_get_info()
    now = min(wanted, room_bytes(free, torch.cuda.memory_reserved()))
    if saved_bytes is None or saved_bytes == now:
        return now
    if abs(saved_bytes - now) <= KEPT_CAP_SLACK_BYTES:  # so that a resumed run makes the same plans as the run before
        return saved_bytes
    logger.warning(
        "plans fill %.2f GiB of the device of rank %d, where those of the run before filled %.2f GiB, so they may differ: the "
        "device has other room now",
        now / _GIB,
        args.rank,
        saved_bytes / _GIB,
    )
    return now


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
        names_of(args)["cap_bytes"] if asked else f"The default cap, {100 * DEVICE_SHARE:.0f}% of the device's memory",
        wanted / _GIB,
        ", ".join(f"{cap / _GIB:.2f}" for cap in caps),
        len(caps) - 1,
        SETUP_MARGIN_BYTES / _GIB,
    )


def offloads(args: argparse.Namespace) -> bool:
    """Return True if plans of a training run may have copies to the host.

    ``auto`` stands for yes where there is a link to measure, or the run gives host memory, and nothing else rules copies out.
    """
    if args.epp_offload != AUTO:
        return bool(args.epp_offload == "on")
    entry = PLANNERS.entry(args.epp_planner)
    may_offload = entry is not None and entry.may_offload and args.epp_recompute == AUTO and args.epp_order != GIVEN
    return may_offload and (torch.cuda.is_available() or args.epp_host_memory_gb is not None)
