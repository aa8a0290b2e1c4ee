"""Pinned host memory for offload, its limit, and the order of copies that use the same part of it.

Pages stay pinned for the next iterations. Data is placed wherever they have room, in several spans if necessary, so pages never
hold more than was in use at one time, but for the rest of the last one, and all memory up to the cap can be used. Memory is
free again when the load out of it is issued; the offload that gets it next waits on its stream for that load.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.features.offload.copy_streams import CopyStreams, Mark
from megatron_epp.plan.errors import Remedy
from megatron_epp.plan.kv_offload import HOST_UNIT_BYTES, in_units
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.runtime.memory_use import HostMemoryError

_PAGE_BYTES = 32 << 20
"""Bytes of a page. Not measured: much smaller ones mean more of the driver's slow calls that pin memory, much larger ones leave
more of the last page unused under a cap.
"""

MACHINE = "the machine's memory"


class Span(NamedTuple):
    """Range of bytes of a page, ``[start, stop)``."""

    page: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        return self.page == other.page and self.start < other.stop and other.start < self.stop


class FreeSpans:
    """Free list: allocates in as few spans as possible and merges adjacent spans when memory is returned.

    An allocation need not be contiguous, so all `num_bytes` free bytes can be allocated, whatever was allocated before.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._spans: list[Span] = []  # in order, and no two of them touch

    def take(self, num_bytes: int) -> list[Span]:
        """Allocate `num_bytes` bytes, which must be free: from the smallest span with room for them, else the largest."""
        taken = []
        while num_bytes:
            roomy = [span for span in self._spans if span.num_bytes >= num_bytes]
            span = min(roomy, key=attrgetter("num_bytes")) if roomy else max(self._spans, key=attrgetter("num_bytes"))
            part = span._replace(stop=span.start + min(num_bytes, span.num_bytes))
            at = self._spans.index(span)
            self._spans[at : at + 1] = [span._replace(start=part.stop)] if part != span else []
            taken.append(part)
            num_bytes -= part.num_bytes
            self.num_bytes -= part.num_bytes
        return taken

    def add(self, spans: Iterable[Span]) -> None:
        merged: list[Span] = []
        for span in sorted([*self._spans, *spans]):
            last = merged[-1] if merged else None
            if last is not None and last.page == span.page and last.stop == span.start:
                merged[-1] = last._replace(stop=span.stop)
            else:
                merged.append(span)
        self._spans, self.num_bytes = merged, sum(span.num_bytes for span in merged)


class HostMemory:
    """Pages of this process, at most `cap_bytes` bytes, and the streams of copies to and from them.

    For a GPU pages are pinned, on the NUMA node of the GPU if the system tells it; for a CPU they are plain memory.
    `allocated_bytes` are of all pages, `held_bytes` of them in use now, and `held_peak_bytes` the most in the iteration.
    """

    def __init__(self, device: torch.device, cap_bytes: int, streams: CopyStreams | None = None) -> None:
        self.device = device
        self.cap_bytes = cap_bytes
        self.allocated_bytes = 0
        self.held_bytes = self.held_peak_bytes = 0
        self._on_gpu = device.type == "cuda"
        self.streams = streams or CopyStreams(torch.cuda if self._on_gpu else None)
        self._cpus = cpus_near(device)
        self._pages: list[Tensor] = []
        self._free = FreeSpans()
        self._read: deque[tuple[Mark, Sequence[Span]]] = deque()  # free spans, and the loads that still read them, in order

    def take(self, num_bytes: int) -> list[Span]:
        """Allocate bytes, rounded up to units. Raises `HostMemoryError` at the cap, or if the system has no more."""
        needed = in_units(num_bytes)
        while self._free.num_bytes < needed:
            self._allocate(self.held_bytes + needed)
        self.held_bytes += needed
        self.held_peak_bytes = max(self.held_peak_bytes, self.held_bytes)
        taken = self._free.take(needed)
        self._order_behind_loads(taken)
        return taken

    def give_back(self, spans: Sequence[Span], read: Mark = None) -> None:
        """Return spans to the free list. Later offloads into them wait for `read`, the mark of loads that still read them."""
        self._free.add(spans)
        self.held_bytes -= sum(span.num_bytes for span in spans)
        if read is not None:
            self._read.append((read, tuple(spans)))

    def _order_behind_loads(self, taken: Sequence[Span]) -> None:
        """Make later offloads wait for the loads that read these spans last, and so for older ones: loads are in order."""
        late = [number for number, (_, read) in enumerate(self._read) if any(a.overlaps(b) for a in read for b in taken)]
        if late:
            self.streams.order(True, self._read[late[-1]][0])
            for _ in range(late[-1] + 1):
                self._read.popleft()

    def memory(self, span: Span) -> Tensor:
        return self._pages[span.page][span.start : span.stop]

    def _allocate(self, wanted_bytes: int) -> None:
        """Add a page. The error names the total bytes wanted, `wanted_bytes`."""
        # The last pages get smaller, so that what fits the cap on paper fits it here: pinned ones round up to powers of two.
        left_bytes = self.cap_bytes - self.allocated_bytes
        page_bytes = min(_PAGE_BYTES, 1 << left_bytes.bit_length() - 1 if left_bytes > 0 else 0)
        if page_bytes < HOST_UNIT_BYTES:
            raise HostMemoryError(
                f"what is offloaded needs {format_gib(wanted_bytes, self.cap_bytes)} of host memory, and a rank may take "
                f"{format_gib(self.cap_bytes, wanted_bytes)}",
                Remedy("raise", "host_cap_bytes"),
                Remedy("lower", "chunk_tokens"),
            )
        try:
            with near(self._cpus):  # pinning touches all of the page, in this thread
                page = torch.empty(page_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the system gives this rank no more than {format_bytes(self.allocated_bytes)} of "
                f"{'pinned ' * self._on_gpu}host memory for offload, of the {format_bytes(self.cap_bytes)} that it may take "
                f"({error})",
                Remedy("lower", "chunk_tokens"),
                Remedy("drop", "offload"),
            ) from error
        self._free.add([Span(len(self._pages), 0, page_bytes)])
        self._pages.append(page)
        self.allocated_bytes += page_bytes


class Region:
    """Consecutive `num_bytes` bytes of host memory, reserved range by range and returned all at once."""

    def __init__(self, host: HostMemory) -> None:
        self.num_bytes = 0
        self._host = host
        self._spans: list[Span] = []
        self._starts: list[int] = []  # of the spans, in the region
        self._room = 0

    def reserve(self, num_bytes: int) -> int:
        """Reserve `num_bytes` more bytes; return their offset. Raises `HostMemoryError`, with the region unchanged."""
        start = self.num_bytes
        for span in self._host.take(max(0, start + num_bytes - self._room)):
            self._spans.append(span)
            self._starts.append(self._room)
            self._room += span.num_bytes
        self.num_bytes += num_bytes
        return start

    def pairs(self, start: int, device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(device, host)`` pairs of equal size: the bytes of `device` and of the region from offset `start`."""
        done, at = 0, bisect_right(self._starts, start) - 1
        while done < device.numel():
            inside = start + done - self._starts[at]
            part = self._host.memory(self._spans[at])[inside : inside + device.numel() - done]
            yield device[done : done + part.numel()], part
            done, at = done + part.numel(), at + 1

    def give_back(self, read: Mark = None) -> None:
        """Return all bytes of the region to the host memory, with the mark of the last load that reads them."""
        self._host.give_back(self._spans, read)
        self._spans, self._starts, self._room, self.num_bytes = [], [], 0, 0


def host_limit(
    groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), machine_bytes: int | None = None
) -> tuple[int, str]:
    """Return the bytes that all processes of this job on this host may use together, and their source: `MACHINE`, or a file.

    The result is the smallest limit of the process's control group (listed in `membership`) and its ancestors, and of the
    machine's memory. Control groups of either version are mounted in `groups` (kernel documentation, admin-guide/cgroup-v2.rst:
    ``memory.max``; cgroup-v1/memory.rst: ``memory.limit_in_bytes``).
    """
    if machine_bytes is None:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([(machine_bytes, MACHINE), *_limits(groups, membership)], key=lambda limit: limit[0])


def _limits(groups: Path, membership: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux, or no permission to read
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        cgroup = root / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents):  # in a container a path may be the host's, of which only the root is there
            if not folder.is_relative_to(root):
                break
            if (limit := _read(folder / name)) is not None:
                yield limit, str(folder / name)


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


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
    """Return the processors of the NUMA node of a PCI device, as in ``0000:dc:00.0``; none if the system does not tell.

    See the kernel's documentation, ABI/testing/sysfs-bus-pci (``numa_node``, -1 for none) and ABI/stable/sysfs-devices-node
    (``cpulist``, as in ``0-15,32-47``).
    """
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
        ranges = [part.partition("-") for part in text.strip().split(",") if part]
        return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
