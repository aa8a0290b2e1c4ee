"""Allocation of host memory on the NUMA node of a GPU, from which its copies do not cross the link between the processors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def near(cpus: frozenset[int]) -> Iterator[None]:
    """Run the body on some of the processors, if this thread may use any of them.

    Linux takes a page from the node of the processor that first touches it, and pinning touches every page of an allocation.
    The thread is moved, not the process, and moved back.
    """
    before = os.sched_getaffinity(0) if cpus else set[int]()
    if not (allowed := cpus & before) or allowed == before:
        yield
        return
    os.sched_setaffinity(0, allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpus_near(device: torch.device) -> frozenset[int]:
    """Return the processors of a GPU's NUMA node; none for a CPU, and if torch or the system does not tell."""
    if device.type != "cuda":
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_domain_id"):  # older releases of torch do not tell the address
        return frozenset()
    return cpus_of_node(f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")


def cpus_of_node(pci_address: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """Return the processors of the NUMA node of a PCI device; none if the system does not tell, or has no nodes.

    See the kernel's documentation, ABI/testing/sysfs-bus-pci (``numa_node``, -1 for none) and ABI/stable/sysfs-devices-node
    (``cpulist``, as in ``0-15,32-47``).

    Args:
        pci_address: as in ``0000:dc:00.0``.
        sysfs: where the kernel's tables are mounted.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",") if part]
        return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
