"""Bytes in use on a rank's device, and errors of running out of memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.runtime.autograd.saved import SavedTensors


class HostMemoryError(EppError):
    """Host memory for offload is exhausted. The remedies that may help are in order, best first."""


OUT_OF_MEMORY = (torch.OutOfMemoryError, HostMemoryError)
"""Exceptions that an action raises when it runs out of memory."""


class Usage(NamedTuple):
    """Bytes a rank has in use, and bytes it has reserved from the device for them; None if that is the same."""

    allocated_bytes: int
    reserved_bytes: int | None = None


def device_usage(static_bytes: int, saved: SavedTensors | None = None) -> Usage | None:
    """Return the bytes torch has allocated and reserved on the current GPU, static bytes included; without a GPU what `saved`
    counts besides these, None if nothing is counted.
    """
    if torch.cuda.is_initialized():
        return Usage(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    return None if saved is None else Usage(static_bytes + saved.held_bytes)


def kept_bytes(saved: SavedTensors | None) -> int:
    """Return the bytes allocated on a GPU, else saved for backwards; 0 if these are not counted."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return 0 if saved is None else saved.live_bytes


def device_peak() -> Usage | None:
    """Return the peaks of allocated and reserved bytes on the current GPU so far; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    return Usage(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def device_retries() -> int | None:
    """Return how often the allocator gave cached memory back and tried again on the current GPU so far; None without a GPU."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_initialized() else None


def possible_on_device(error: EppError) -> EppError:
    """Return the error without the advice to raise the cap if that would be above the memory of this rank's device."""
    if not isinstance(error, InfeasibleError) or not torch.cuda.is_initialized():
        return error
    total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return error.without_remedies("cap_bytes") if error.least_cap_bytes > total_bytes else error
