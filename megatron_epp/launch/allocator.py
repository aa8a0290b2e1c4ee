"""Settings of torch's GPU memory allocator through environment variables."""

from __future__ import annotations

from collections.abc import Mapping

EXPANDABLE = "expandable_segments:True"
"""Setting for segments that grow: chunks differ in size, and fixed segments would leave unusable gaps."""


def variables(torch_version: str) -> tuple[str, ...]:
    """Environment variables that this torch reads, the preferred one first. 2.9 renamed it and still reads the old name."""
    old = ("PYTORCH_CUDA_ALLOC_CONF",)
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    return ("PYTORCH_ALLOC_CONF", *old) if (major, minor) >= (2, 9) else old


def setting(environment: Mapping[str, str], torch_version: str) -> tuple[str, str] | None:
    """Name and value of the effective variable; None if none is set."""
    return next(((name, environment[name]) for name in variables(torch_version) if name in environment), None)


def segments_expand(environment: Mapping[str, str], torch_version: str) -> bool:
    """True if segments are expandable."""
    found = setting(environment, torch_version)
    return found is not None and EXPANDABLE in found[1]
