"""Description of an action that ran out of memory: planned bytes against bytes in use, and the flags most likely to help."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron_epp.launch.machine import EXPANDABLE, allocator_setting, segments_expand
from megatron_epp.plan import Action, Op, Plan, is_unlimited
from megatron_epp.plan.errors import Names, as_setting
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.units import format_bytes
from megatron_epp.runtime.memory_use import HostMemoryError, Usage, device_usage

LEAST_SHARE = 0.05
"""Least share of the dynamic bytes (peak minus static) by which an advised cap lies below the plan's peak.

It is needed where there is no excess to go by: the device ran out below the planned bytes, or usage is not counted. Not
measured: less may take several trials to fit, more gives away time for recompute.
"""

_GAPS = 0.1
"""Share of the reserved memory above which unallocated memory is a sign of fragmentation. Not measured: with less, advice about
the allocator comes where memory is simply full; with more, it is missing where gaps are the cause.
"""

_IN_PLAN = {Op.SEND_F: Op.F, Op.RECV_F: Op.F, Op.SEND_B: Op.B, Op.RECV_B: Op.B, Op.FREE: Op.O, Op.REDUCE: Op.B}
"""Ops that lowering adds, each with the planned op whose memory it is compared with."""
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")  # of the failed allocation, in torch's message
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """Report of a rank's action that ran out of memory."""

    # Function from the rank's static bytes to its usage, or to None if that is not counted
    usage: Callable[[int], Usage | None] = device_usage
    recompute_is_fixed: bool = False  # the planner was not free to choose the amount of recompute
    # The plan has made the chunks; otherwise they are a script's microbatches, which the script makes
    makes_chunks: bool = True
    names: Names = field(default_factory=dict)

    def text(self, plan: Plan, rank: int, action: Action, error: Exception) -> str:
        """Return what happened and what to change, in a few lines, while the error's frames still hold the action's tensors."""
        planned = simulate(plan).planned_bytes(rank, action._replace(op=_IN_PLAN.get(action.op, action.op)))
        usage, match = self.usage(plan.static_bytes[rank]), _WANTED.search(str(error))
        wanted = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        excess = 0 if usage is None else max(0, usage.allocated_bytes + wanted - planned)
        cap, stage, chunk = plan.cap_bytes[rank], action.stage, action.chunk
        limit = "no cap" if is_unlimited(cap) else f"a cap of {format_bytes(cap)}"
        lines = (
            f"out of memory on stage {stage}, chunk {chunk}: {plan.padded_tokens(chunk):,} tokens, {plan.num_layers[stage]} "
            f"layers, recompute: {plan.recompute[stage][chunk]}",
            f"planned for the rank at this action: {format_bytes(planned)}, with {limit}; "
            f"{_found(usage, wanted, self.names.get('measure_memory', ''))}",
            *((error.message,) if isinstance(error, HostMemoryError) else ()),
            "most likely to help: " + " or ".join(self._advice(plan, action, error, usage, lower_cap(plan, rank, excess))),
        )
        return "\n".join(lines)

    def _advice(self, plan: Plan, action: Action, error: Exception, usage: Usage | None, lower: int | None) -> list[str]:
        """Return the two changes most likely to help, by the error and the memory in use."""
        changes = []
        if isinstance(error, HostMemoryError):
            remedies = error.remedies if self.makes_chunks else error.without_remedies("chunk_tokens").remedies
            changes += [f"{remedy.verb} {remedy.object(self.names)}" for remedy in remedies]
        reserved = None if usage is None else usage.reserved_bytes
        has_gaps = usage and reserved is not None and reserved - usage.allocated_bytes > _GAPS * reserved
        if has_gaps and not segments_expand(os.environ, torch.__version__):
            changes.append(f"{allocator_setting({}, torch.__version__)[0]}={EXPANDABLE}")
        if self.recompute_is_fixed:
            changes.append(self._setting("recompute", "auto"))
        if lower is not None:
            gib = float(f"{lower / 2**30:.4g}")
            changes.append(self._setting("cap_bytes", int(gib) if gib.is_integer() else gib))
        tokens = max(1, plan.padded_tokens(action.chunk) // 2)
        own = self._setting("chunk_tokens", tokens)
        changes.append(own if self.makes_chunks else f"microbatches of at most {tokens:,} tokens")
        return [*changes, "more pipeline stages"][:2]

    def _setting(self, setting: str, value: object) -> str:
        return as_setting(self.names.get(setting, setting), value)


def lower_cap(plan: Plan, rank: int, excess_bytes: int) -> int | None:
    """Return the cap to try next, in bytes; None if only static memory would fit under it.

    It is lower by `excess_bytes`, the bytes in use beyond the plan, and in any case lower than the plan's peak.
    """
    peak, static = simulate(plan).peak_bytes[rank], plan.static_bytes[rank]
    lower = min(plan.cap_bytes[rank] - excess_bytes, peak - math.ceil(LEAST_SHARE * (peak - static)))
    return lower if lower > static else None


def _found(usage: Usage | None, wanted_bytes: int, name: str) -> str:
    if usage is None:
        return f"what is in use was not counted{f' (without a GPU, {name} counts it)' if name else ''}"
    reserved = "" if usage.reserved_bytes is None else f", {format_bytes(usage.reserved_bytes)} reserved"
    wanted = f", and {format_bytes(wanted_bytes)} more wanted" if wanted_bytes else ""
    return f"in use: {format_bytes(usage.allocated_bytes)}{reserved}{wanted}"
