"""Communicators of a pipeline's messages: their number, the SMs that they hold and the device memory of their buffers.

Sources: NCCL's user guide (environment variables NCCL_BUFFSIZE and NCCL_MAX_CTAS), and for what it does not say NCCL's code:
buffers of the three protocols in src/init.cc (computeBuffSizes), channels of messages, which CTAs serve and which are powers of
two, in src/graph/paths.cc (ncclTopoComputeP2pChannels). Nothing here has been measured on a GPU.
"""

from __future__ import annotations

_CTAS = 4
"""Number of CTAs of a communicator, if SMs suffice: messages are overlapped with compute, which makes better use of the SMs."""

_LARGEST_SHARE = 4
"""Inverse of the largest share of a device's SMs that all communicators of a rank may hold together."""

NVLINK_CTAS = 16
"""CTAs that NCCL gives to a large message over NVLink of an H100, without a maximum."""

_STEPS = 8
"""Messages in a buffer (NCCL_STEPS)."""

_SIMPLE_BYTES = 4 << 20
"""Buffer of the protocol Simple (NCCL_BUFFSIZE)."""

_LL_BYTES = 8 * 512 * _STEPS * 16
"""Buffer of the protocol LL: lines of a thread, threads, steps, bytes of a line."""

_LL128_BYTES = 120 * 640 * _STEPS * 8
"""Buffer of the protocol LL128: elements of a thread, threads, steps, bytes of an element."""

CHANNEL_BYTES = _SIMPLE_BYTES + _LL_BYTES + _LL128_BYTES
"""Device memory of a channel between two ranks, on the side that holds its buffers: the receiver, over a network both."""


def link_ctas(num_links: int, num_sms: int) -> int:
    """Return the maximum number of CTAs of one communicator, a power of two, since NCCL rounds channels up to one; at least 1.

    All `num_links` communicators for messages of a rank may wait at the same time, on a device with `num_sms` SMs.
    """
    room = num_sms // _LARGEST_SHARE // max(1, num_links)
    return 1 << max(1, min(_CTAS, room)).bit_length() - 1
