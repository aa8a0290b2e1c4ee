"""How torch's allocator on the GPU is told what to do."""

from __future__ import annotations

from collections.abc import Mapping

EXPANDABLE = "expandable_segments:True"
"""Segments that grow: chunks differ in size, and between fixed segments gaps stay that nothing fits."""


def variables(torch_version: str) -> tuple[str, ...]:
    """The environment variables this torch reads, the one to set first. 2.9 has renamed it, and reads the old name too."""
    old = ("PYTORCH_CUDA_ALLOC_CONF",)
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    return ("PYTORCH_ALLOC_CONF", *old) if (major, minor) >= (2, 9) else old


def setting(environment: Mapping[str, str], torch_version: str) -> tuple[str, str] | None:
    """Name and value of the variable that counts, None where none is set."""
    return next(((name, environment[name]) for name in variables(torch_version) if name in environment), None)


def segments_expand(environment: Mapping[str, str], torch_version: str) -> bool:
    """Whether segments grow."""
    found = setting(environment, torch_version)
    return found is not None and EXPANDABLE in found[1]
