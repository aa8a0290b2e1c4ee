"""All ranks of a pipeline run the same plan, or none does."""

from __future__ import annotations

from itertools import zip_longest

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
    first, second = plans[0], plans[other]
    assert first is not None
    assert second is not None
    raise DisagreementError(
        f"rank {ranks[0]} planned {others[0][:16]} but rank {ranks[other]} planned {others[other][:16]}: "
        f"{_difference(first, second)}. All ranks need the same data files, --seed and --epp-* flags"
    )


def _difference(first: Plan, second: Plan) -> str:
    for sequence, (a, b) in enumerate(zip_longest(first.lengths, second.lengths)):
        if a != b:
            return f"sequence {sequence} has {a} or {b} tokens"
    for rank, (left, right) in enumerate(zip_longest(first.ranks, second.ranks, fillvalue=())):
        for position, steps in enumerate(zip_longest(left, right)):
            if steps[0] != steps[1]:
                both = " or ".join("nothing" if s is None else f"{s.action} ({s.time_us:.1f} us)" for s in steps)
                return f"pipeline rank {rank}, action {position} is {both}"
    return "their actions agree, other fields differ (chunks, recompute or costs)"
