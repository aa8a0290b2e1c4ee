"""Upload of what an iteration reads on its device: many small tensors in one buffer, by one copy on a stream of its own.

A copy for each of them would cost a call each, and wait behind offloaded activations where it shares their stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_epp.plan import EppError

_ALIGNMENT_BYTES = 16
"""Alignment of every tensor in the buffer: kernels that load several elements at once load up to 16 bytes."""
_PADDING = torch.zeros(_ALIGNMENT_BYTES, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Upload:
    """Tensors that are on their way to the device, as views of one buffer; `wait`, called once, makes the stream wait."""

    buffer: Tensor
    tensors: tuple[Tensor, ...]
    wait: Callable[[], None]


class Uploader:
    """Uploader of tensors to a device. Uploads may be begun in any thread.

    Tensors of all types share one buffer of bytes, so an iteration has one copy and one event whatever it uploads. A GPU's
    device has its index; `cuda` makes streams, as `torch.cuda` does; it is None on a CPU, where copies are made at once.
    """

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self.device, self._cuda = device, cuda
        self._stream: Any = None if cuda is None else cuda.Stream()

    def begin(self, tensors: Sequence[Tensor]) -> Upload:
        """Start to copy tensors of the CPU to the device.

        Pinned memory comes from torch's cache, which gives it out again when its copy has ended. Raises `EppError` where the
        host or the device has no memory left.
        """
        if self._cuda is not None:
            self._cuda.set_device(self.device)  # a thread begins with the node's first GPU
        starts, pieces = _laid_out(tensors)
        size = sum(len(piece) for piece in pieces)
        with nullcontext() if self._cuda is None else self._cuda.stream(self._stream):
            host, buffer = self._buffers(size)
            if pieces:
                torch.cat(pieces, out=host)
            buffer.copy_(host, non_blocking=True)
            done = None if self._stream is None else self._stream.record_event()
        views = tuple(
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        )
        return Upload(buffer, views, lambda: self._wait(buffer, done))

    def _buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        try:
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            return host, torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:  # for pinned memory CUDA's own error, else torch's
            reason = str(error).partition("\n")[0]
            raise EppError(f"no memory for the {num_bytes:,} bytes that an iteration reads on its device: {reason}") from None

    def _wait(self, buffer: Tensor, done: Any) -> None:
        if self._cuda is None:
            return
        stream = self._cuda.current_stream()
        stream.wait_event(done)
        if buffer.is_cuda:  # its memory is of another stream, which must not take it back while this one reads it
            buffer.record_stream(stream)


def _laid_out(tensors: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Return where each tensor starts in a buffer, and the pieces of bytes that fill it: tensors, and padding between them."""
    starts, pieces, size = list[int](), list[Tensor](), 0
    for tensor in tensors:
        starts.append(size)
        # Not `view(-1)`: it leaves the only element of a strided tensor its stride, of which bytes cannot be a view.
        pieces.append(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8))
        unused = -tensor.nbytes % _ALIGNMENT_BYTES
        if unused:
            pieces.append(_PADDING[:unused])
        size += tensor.nbytes + unused
    return starts, pieces
