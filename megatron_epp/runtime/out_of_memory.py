"""Memory that runs out: what was planned, what is there, what to change, and how far to go down."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_epp.launch import allocator
from megatron_epp.plan import Action, EppError, Op, Plan, is_unlimited, simulate

LEAST_SHARE = 0.05
"""Of the bytes that come and go: another plan's peak must be lower by this at least. Where the device gave out below the plan,
or nobody counts, there is no excess to go by.
"""

_GAPS = 0.1
"""More of the reserved memory than this lying idle is a sign of fragments."""

_IN_PLAN = {Op.SEND_F: Op.F, Op.RECV_F: Op.F, Op.SEND_B: Op.B, Op.RECV_B: Op.B, Op.FREE: Op.O, Op.REDUCE: Op.B}
"""What lowering adds, and what it belongs to."""
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class ShortageError(EppError):
    """Something else than the device has no more memory to give: a pool of host memory, for instance.

    Args:
        message: says what, with numbers.
        advice: the flags that help, most likely first.
    """

    def __init__(self, message: str, advice: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.advice = advice


SHORTAGES = (torch.OutOfMemoryError, ShortageError)
"""What an action raises when memory runs out."""


class Usage(NamedTuple):
    """Bytes a rank has in use, and how many it has taken from the device to serve them, where that differs."""

    allocated_bytes: int
    reserved_bytes: int | None = None


def device_usage(static_bytes: int) -> Usage | None:
    """What torch has taken from the current GPU; None without one. It counts the static bytes itself."""
    if not torch.cuda.is_initialized():
        return None
    return Usage(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def device_peak() -> Usage | None:
    """As above, but the most that either has been so far; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    return Usage(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


@dataclass(frozen=True, slots=True)
class Shortage:
    """An action that found no memory.

    Attributes:
        text: what happened and what to change, in a few lines.
        cap_bytes: what the rank's cap should be for another try: lower by what was in use beyond the plan, and in any
            case below the plan's peak. None where it is not the device that ran out: a lower cap would not help.
    """

    text: str
    cap_bytes: int | None


@dataclass(frozen=True, slots=True)
class ShortagePolicy:
    """What a rank does when memory runs out.

    Attributes:
        survives: go on without computing, so that other ranks can end the plan (`runtime.drain`); else the run ends.
        usage: from the rank's static bytes to what is in use; None where nobody counts.
        recompute_is_fixed: the planner was not free to choose how much recomputes.
    """

    survives: bool = False
    usage: Callable[[int], Usage | None] = device_usage
    recompute_is_fixed: bool = False

    def examine(self, plan: Plan, rank: int, action: Action, error: Exception) -> Shortage:
        """What to say of an action that found no memory. Call it while the error's frames still hold what they had made."""
        timeline = simulate(plan)
        planned = timeline.planned_bytes(rank, action._replace(op=_IN_PLAN.get(action.op, action.op)))
        peak, cap, static = timeline.peak_bytes[rank], plan.cap_bytes[rank], plan.static_bytes[rank]
        usage, wanted = self.usage(static), _wanted_bytes(error)
        excess = 0 if usage is None else max(0, usage.allocated_bytes + wanted - planned)
        lower = max(0, min(cap - excess, peak - math.ceil(LEAST_SHARE * (peak - static))))
        lines = (
            f"out of memory on stage {action.stage}, chunk {action.chunk}: {_what_for(plan, action)}",
            f"planned for the rank at this action: {_gib(planned)}, with {_cap(cap)}; {_found(usage, wanted)}",
            *((str(error),) if isinstance(error, ShortageError) else ()),
            "most likely to help: " + " or ".join(self._advice(plan, action, error, usage, lower if lower > static else None)),
        )
        return Shortage("\n".join(lines), None if isinstance(error, ShortageError) else lower)

    def _advice(self, plan: Plan, action: Action, error: Exception, usage: Usage | None, lower: int | None) -> list[str]:
        """The two flags most likely to help, by the signs there are."""
        found = list(error.advice) if isinstance(error, ShortageError) else []
        if _has_gaps(usage) and not allocator.segments_expand(os.environ, torch.__version__):
            found.append(f"{allocator.variables(torch.__version__)[0]}={allocator.EXPANDABLE}")
        if self.recompute_is_fixed:
            found.append("--epp-recompute auto")
        if lower is not None:
            found.append(f"--epp-memory-cap-gb {lower / 2**30:.4g}")
        found.append(f"--epp-chunk-tokens {max(1, plan.padded_tokens(action.chunk) // 2)}")
        return [*found, "more stages (--pipeline-model-parallel-size)"][:2]


def _has_gaps(usage: Usage | None) -> bool:
    if usage is None or usage.reserved_bytes is None:
        return False
    return usage.reserved_bytes - usage.allocated_bytes > _GAPS * usage.reserved_bytes


def _wanted_bytes(error: Exception) -> int:
    """What could not be had, as torch tells it; 0 where nobody does."""
    found = _WANTED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _what_for(plan: Plan, action: Action) -> str:
    layers, recompute = plan.num_layers[action.stage], plan.recompute[action.stage][action.chunk]
    return f"{plan.padded_tokens(action.chunk):,} tokens, {layers} layers, recompute: {recompute}"


def _found(usage: Usage | None, wanted_bytes: int) -> str:
    if usage is None:
        return "nobody counted what is in use (--epp-measure-memory does, without a GPU)"
    reserved = "" if usage.reserved_bytes is None else f", {_gib(usage.reserved_bytes)} reserved"
    wanted = f", and {_gib(wanted_bytes)} more wanted" if wanted_bytes else ""
    return f"in use: {_gib(usage.allocated_bytes)}{reserved}{wanted}"


def _cap(cap_bytes: int) -> str:
    return "no cap" if is_unlimited(cap_bytes) else f"a cap of {_gib(cap_bytes)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.4g} GiB"
