"""This machine in a few words."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def cpu_name() -> str:
    """This machine's processor and how many cores it has, as profiles name it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def count_gpus() -> int:
    """That torch sees."""
    import torch

    return torch.cuda.device_count()


def machine() -> str:
    """Its GPUs, else its processor."""
    if not (gpus := count_gpus()):
        return cpu_name()
    import torch

    return f"{gpus} x {torch.cuda.get_device_name()}"
