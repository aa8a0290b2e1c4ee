"""NCCL communicators of training: settings of a pipeline's links, and allocation of the communicators' memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.plan import EppError
from megatron_epp.plan.communicators import Direction
from megatron_epp.plan.reading import brief, naming_file, read_text, whole
from megatron_epp.plan.yaml_files import MOST_YAML_BYTES, parse_yaml
from megatron_epp.runtime.links.nccl import link_defaults, options_of, smallest_device, uses_nccl
from megatron_epp.runtime.links.objects import GroupOptions

_GROUP = "pp"
"""Megatron's name for pipelines in `--nccl-communicator-config-path`."""

_MOST_CTAS = 1024
"""Largest number of CTAs that is read, more than a device has SMs."""


def link_settings(own: Mapping[str, Any], num_links: int, num_sms: int) -> dict[str, Any]:
    """Return a link's settings, the user's `own` first. Raises `EppError` if a rank's links together could hold every SM."""
    defaults = link_defaults(num_links, num_sms)
    ours = defaults["max_ctas"]
    settings = {**defaults, "max_ctas": max(ours, own.get("min_ctas", 0)), **own}
    most = 1 << (settings["max_ctas"] - 1).bit_length()  # as NCCL rounds it
    if most > ours and num_links * most >= num_sms:
        name = "max_ctas" if "max_ctas" in own else "min_ctas"
        raise EppError(
            f"--nccl-communicator-config-path gives {_GROUP!r} {name} {own[name]}: the {num_links} links of a rank could hold "
            f"{num_links * most} SMs of a device with {num_sms}, and nothing else would run. Set it to {ours}, or leave it out"
        )
    return settings


def link_options(args: argparse.Namespace, used: Sequence[Direction]) -> GroupOptions | None:
    """Return a factory of options for the groups that carry messages in the used directions; None if these do not use NCCL.

    Every rank of the job must call this at the same point. Raises `EppError` if a rank's links could hold every SM.
    """
    if not uses_nccl():
        return None
    return options_of(link_settings(user_settings(args), *smallest_device(used)), time_limit(args))


def time_limit(args: argparse.Namespace) -> timedelta:
    return timedelta(minutes=args.distributed_timeout_minutes)


def user_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Read the user's communicator settings for pipelines, from a file and from flags. Raises `EppError` for another file."""
    options: dict[str, Any] = {}
    if (path := args.nccl_communicator_config_path) is not None:
        with naming_file(f"--nccl-communicator-config-path {path}"):
            options |= _of_pipelines(parse_yaml(read_text(path, MOST_YAML_BYTES), "the file"))
    # As Megatron adds the flag to the file's settings, which hold for its own groups only.
    if _GROUP in (args.high_priority_stream_groups or ()):
        options["is_high_priority_stream"] = True
    return options


def _of_pipelines(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict | None):
        raise EppError(f"the file holds {brief(body)}; it must hold names of groups with their settings")
    settings = (body or {}).get(_GROUP) or {}
    if not isinstance(settings, dict):
        raise EppError(f"{_GROUP} is {brief(settings)}; it must hold names with values")
    for name in ("min_ctas", "max_ctas"):
        if name in settings:
            try:
                whole(settings[name], 1, _MOST_CTAS)
            except EppError as error:
                raise EppError(f"{name} of {_GROUP}: {error}") from None
    if str(settings.get("net_name", "IB")).lower() not in ("ib", "socket"):
        raise EppError(f"net_name of {_GROUP} is {brief(settings['net_name'])}; it must be IB or Socket")
    return settings


def groups_in_use(args: argparse.Namespace) -> list[dist.ProcessGroup]:
    """Return this rank's groups of several ranks whose collectives training uses, in the same order on all ranks."""
    wanted = [
        mpu.get_tensor_model_parallel_group(),
        mpu.get_context_parallel_group(),
        mpu.get_data_parallel_group(with_context_parallel=True),
        mpu.get_pipeline_model_parallel_group(),
        mpu.get_model_parallel_group(),
        mpu.get_embedding_group(check_initialized=False),  # which ranks in the middle are not in
        mpu.get_position_embedding_group(check_initialized=False),
    ]
    if args.use_distributed_optimizer:  # for the norm of gradients
        wanted.append(mpu.get_intra_distributed_optimizer_instance_group())
    if args.num_experts is not None:
        wanted += [
            mpu.get_expert_model_parallel_group(),
            mpu.get_expert_tensor_and_model_parallel_group(),
            mpu.get_expert_data_parallel_group(),
        ]
    there = dict.fromkeys(group for group in wanted if group is not None)
    return [group for group in there if dist.get_world_size(group) > 1]


def reduce_once(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Run one collective on each group, since NCCL creates a communicator, and allocates its memory, only on first use.

    Every rank must list its groups in the same global order, to avoid deadlock.
    """
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
