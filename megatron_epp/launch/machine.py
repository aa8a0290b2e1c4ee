"""Facts about this machine that a launch needs: processor, GPUs, installed packages, a free port, the GPU memory allocator."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle, islice
from pathlib import Path

EXPANDABLE = "expandable_segments:True"
"""Allocator setting for segments that grow: chunks differ in size, and fixed segments would leave unusable gaps."""
TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""Variable with which NVIDIA's containers let torch multiply fp32 matrices in TF32, with relative errors of about 3e-4."""
SHARED_GPUS = "NCCL_MULTI_RANK_GPU_ENABLE"  # variable that lets ranks share a GPU, from NCCL 2.30 on
NO_TF32 = {TF32: "0"}  # variables of runs in fp32 that others are compared with


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def nccl_version() -> tuple[int, int, int] | None:
    """Version of the NCCL library that this process loads, not always what torch was built with; None without."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def has_room_for(num_ranks: int) -> bool:
    """True if so many ranks can run here: a GPU each, or shared, which NCCL can from 2.30 on, or on the processor."""
    return not 0 < count_gpus() < num_ranks or (nccl_version() or (0,))[:2] >= (2, 30)


def sharing_gpus(num_ranks: int) -> dict[str, str]:
    """Variables for ranks that share GPUs of this machine in turn, as NCCL 2.30 and later can; none if there are enough."""
    if num_ranks <= (gpus := count_gpus()):
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return {"CUDA_VISIBLE_DEVICES": ",".join(islice(cycle(visible.split(",")), num_ranks)), SHARED_GPUS: "1"}


def machine() -> str:
    if not (gpus := count_gpus()):
        return cpu_name()
    import torch

    return f"{gpus} x {torch.cuda.get_device_name()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def allocator_setting(environment: Mapping[str, str], torch_version: str) -> tuple[str, str | None]:
    """Name and value of the variable of torch's allocator, which torch 2.9 renamed; the new name and None if none is set."""
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    names = ["PYTORCH_ALLOC_CONF"] * ((major, minor) >= (2, 9)) + ["PYTORCH_CUDA_ALLOC_CONF"]
    return next(((name, environment[name]) for name in names if name in environment), (names[0], None))


def allocator_environment(environment: Mapping[str, str], torch_version: str) -> dict[str, str]:
    """Variables to set for processes that train, so that segments expand; none if the user has set the allocator's."""
    name, value = allocator_setting(environment, torch_version)
    return {name: EXPANDABLE} if value is None else {}


def segments_expand(environment: Mapping[str, str], torch_version: str) -> bool:
    return EXPANDABLE in (allocator_setting(environment, torch_version)[1] or "")
