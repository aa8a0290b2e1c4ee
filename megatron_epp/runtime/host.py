"""Host memory for what leaves the device for a while, and the way there.

Memory comes in pages of one size, which are kept: whatever the next iteration moves finds them, pinned and in any combination.
Copies run one after the other on a stream of their own. A page is free again when the copy out of it is issued, for the next
copy into it comes later on the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_epp.runtime.shortage import ShortageError

_PAGE_BYTES = {"cuda": 32 << 20, "cpu": 1 << 20}
_ALIGNED_BYTES = 256


class HostMemoryError(ShortageError):
    """The host gives no more pages."""


class HostMemory:
    """Pages of this process, and the copy stream of its device.

    Args:
        device: where the other end of every copy is. On a GPU pages are pinned; on a CPU they stand for it.
        cap_bytes: what all pages may take.

    Attributes:
        held_bytes, held_peak_bytes: here now, and most of them in the iteration.
    """

    def __init__(self, device: torch.device, cap_bytes: int) -> None:
        self.device = device
        self.cap_bytes = cap_bytes
        self.allocated_bytes = 0
        self.held_bytes = self.held_peak_bytes = 0
        self._on_gpu = device.type == "cuda"
        self._page_bytes = min(_PAGE_BYTES[device.type], cap_bytes)
        self._free: list[Tensor] = []
        self._stream: Any = torch.cuda.Stream(device) if self._on_gpu else None

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Pages for memory of these sizes, bytes. Raises `HostMemoryError` at the cap, or when there is no more."""
        needed = -(-sum(map(_aligned, sizes)) // self._page_bytes)
        while len(self._free) < needed:
            self._free.append(self._allocate())
        return [self._free.pop() for _ in range(needed)]

    def count(self, more_bytes: int) -> None:
        """So many more bytes are here, or fewer."""
        self.held_bytes += more_bytes
        self.held_peak_bytes = max(self.held_peak_bytes, self.held_bytes)

    def give_back(self, pages: list[Tensor]) -> None:
        """Let later copies have the pages."""
        self._free += pages

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies in the body run on the copy stream, behind what the compute stream was given before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """The place that the copy stream has got to, for `wait`."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Let the compute stream wait for a place. The host does not."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    def _allocate(self) -> Tensor:
        needed = self.allocated_bytes + self._page_bytes
        if needed > self.cap_bytes:
            raise HostMemoryError(
                f"what is offloaded needs more than {self.allocated_bytes / 2**30:.3g} GB of host memory and "
                f"--epp-host-memory-gb allows {self.cap_bytes / 2**30:.3g} per rank",
                ("a higher --epp-host-memory-gb", "a lower --epp-chunk-tokens"),
            )
        try:
            page = torch.empty(self._page_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        except RuntimeError as error:
            raise HostMemoryError(
                f"the system gives this rank no more than {self.allocated_bytes / 2**30:.3g} GB of "
                f"{'pinned ' * self._on_gpu}host memory for offload, below --epp-host-memory-gb ({error})",
                ("a lower --epp-chunk-tokens", "no --epp-offload"),
            ) from error
        self.allocated_bytes = needed
        return page


class Region:
    """Bytes at the host, in pages, handed out range by range and given back all at once.

    Attributes:
        num_bytes: handed out.
    """

    def __init__(self, host: HostMemory) -> None:
        self.num_bytes = 0
        self._host = host
        self._pages: list[Tensor] = []
        self._end = 0

    def reserve(self, num_bytes: int) -> int:
        """Where the next so many bytes start. Raises `HostMemoryError`, and then has as many as before."""
        start, room = self._end, sum(page.numel() for page in self._pages)
        self._pages += self._host.take([max(0, start + num_bytes - room)])
        self._end += _aligned(num_bytes)
        self.num_bytes += num_bytes
        return start

    def pairs(self, start: int, device: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes on the device, and those from so many on, cut into parts that belong together, ``(device, host)``."""
        return _pairs(device, self._pages, start)

    def give_back(self) -> None:
        """Let others have all of it."""
        self._host.give_back(self._pages)
        self._pages, self._end, self.num_bytes = [], 0, 0


def pair_up(parts: Sequence[Tensor], pages: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut memory on the device (bytes, ``[size]``) and pages into parts that belong together, ``(device, host)``, of as many
    bytes.
    """
    start = 0  # in all pages
    for device in parts:
        yield from _pairs(device, pages, start)
        start += _aligned(device.numel())


def _pairs(device: Tensor, pages: Sequence[Tensor], start: int) -> Iterator[tuple[Tensor, Tensor]]:
    page_bytes = pages[0].numel() if pages else 1
    done = 0
    while done < device.numel():
        number, inside = divmod(start + done, page_bytes)
        part = min(page_bytes - inside, device.numel() - done)
        yield device[done : done + part], pages[number][inside : inside + part]
        done += part


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
