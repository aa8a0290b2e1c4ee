"""Stand-ins for the caches of libraries: the keys under which they look up what they have built for a shape.

They follow the sources of Transformer Engine 2.20 (`fused_attn_f16_arbitrary_seqlen.cu`, `utils.cu` and `common.cpp` of its
norms), and what `torch.compile` and Triton do by default. Keys that a run does not change, such as the type, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log2

from megatron_epp.plan.shape_classes import CallSize


def _batch_bucket(count: int) -> int:
    """Round a batch size as Transformer Engine does: 32, a power of two up to 512, then a multiple of it."""
    power = ceil(log2(count))
    return 32 if power <= 5 else 2**power if power <= 9 else -(-count // 512) * 512


def _token_bucket(count: int) -> int:
    """Round a token count as Transformer Engine does: 1,024, a power of two up to 32,768, then a multiple of it."""
    power = ceil(log2(count))
    return 1024 if power <= 10 else 2**power if power <= 15 else -(-count // 32768) * 32768


Key = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """Attention library: the keys of its plans, and the sizes with which it is called here.

    Attributes:
        name: for the table.
        forward, backward: key of a call of some size; None if it builds nothing.
        padded: sizes of the call once its shape is in a class.
    """

    name: str
    forward: Callable[[CallSize], Key | None]
    backward: Callable[[CallSize], Key | None]
    padded: Callable[[CallSize], CallSize]


def _in_class(size: CallSize) -> CallSize:
    return size._replace(segments=size.shape_class.segments)


def _bucketed(size: CallSize) -> Key:
    return _batch_bucket(size.segments), _token_bucket(size.queries), _token_bucket(size.keys)


def _exact_segments(size: CallSize) -> Key:
    return size.segments, _token_bucket(size.queries), _token_bucket(size.keys)


def _nothing(size: CallSize) -> None:
    """Return no key: nothing is built."""


LIBRARIES = (
    Library("cuDNN from 9.24, Transformer Engine from 2.18", _exact_segments, _bucketed, _in_class),
    Library("cuDNN from 9.6", _bucketed, _bucketed, _in_class),
    Library("FlashAttention", _nothing, _nothing, lambda size: size),
)


def as_they_are(library: Library) -> Library:
    """Return the library, called with the sizes of chunks as they are."""
    return replace(library, padded=lambda size: size)


def fused_keys(tokens: int) -> set[tuple[str, str]]:
    """Return what is built for fused layers' kernels when they first run on a number of tokens.

    `torch.compile` builds a function for its first size, one for any other, and one for a single token; Triton distinguishes
    multiples of 16; and Transformer Engine's norms have faster kernels for multiples of 4.
    """
    return {
        ("torch.compile", "first size"),
        ("torch.compile", "one token" if tokens == 1 else "any size"),
        ("Triton", "multiple of 16" if tokens % 16 == 0 else "other"),
        ("norm", "multiple of 4" if tokens % 4 == 0 else "other"),
    }
