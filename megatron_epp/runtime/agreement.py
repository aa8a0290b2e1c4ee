"""All ranks of a pipeline run the same plan, or none does."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_epp.schedule import EppError, Plan
from megatron_epp.schedule.serialize import digest


class DisagreementError(EppError):
    """Ranks of one pipeline made different plans."""


def agree(plan: Plan, group: dist.ProcessGroup) -> None:
    """Compare the plan's digest over a CPU group.

    Raises:
        DisagreementError: on every rank of the group, with the digests and the first differing action.
    """
    mine = digest(plan)
    size = dist.get_world_size(group)
    local = torch.frombuffer(bytearray.fromhex(mine), dtype=torch.uint8)
    gathered = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather(gathered, local, group=group)
    others = ["".join(f"{b:02x}" for b in g.tolist()) for g in gathered]
    if len(set(others)) == 1:
        return
    plans: list[Plan | None] = [None] * size
    dist.all_gather_object(plans, plan, group=group)
    other = next(i for i, d in enumerate(others) if d != others[0])
    ranks = dist.get_process_group_ranks(group)
    difference = _difference(plans[0], plans[other])  # type: ignore[arg-type]
    raise DisagreementError(
        f"rank {ranks[0]} planned {others[0][:16]} but rank {ranks[other]} planned {others[other][:16]}: "
        f"{difference}. All ranks need the same data files, --seed and --epp-* flags"
    )


def _difference(first: Plan, second: Plan) -> str:
    if first.lengths != second.lengths:
        return f"sequence lengths differ ({first.lengths[:4]}... and {second.lengths[:4]}...)"
    for rank, (a, b) in enumerate(zip(first.ranks, second.ranks, strict=False)):
        for position, (left, right) in enumerate(zip(a, b, strict=False)):
            if left != right:
                both = " or ".join(f"{step.action} ({step.time_us:.1f} us)" for step in (left, right))
                return f"pipeline rank {rank}, action {position} is {both}"
    return "their actions agree, other fields differ (chunks, recompute or costs)"
