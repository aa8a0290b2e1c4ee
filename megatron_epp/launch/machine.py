"""Short description of this machine."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    """Name of this machine's processor and its number of cores, as profiles record it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def count_gpus() -> int:
    """Number of GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def machine() -> str:
    """Name of this machine's GPUs, or of its processor if it has none."""
    if not (gpus := count_gpus()):
        return cpu_name()
    import torch

    return f"{gpus} x {torch.cuda.get_device_name()}"
