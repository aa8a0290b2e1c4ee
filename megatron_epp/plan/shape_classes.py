"""Classes of shapes for which cuDNN builds kernel plans, so that a new batch rarely has a new one.

cuDNN, through Transformer Engine, compiles a plan for every class of an attention call, in tens to hundreds of milliseconds,
and keeps it for the thread that asked. By its source a class has the numbers of query and of key tokens, each rounded up to
1,024, to a power of two up to 32,768, or to a multiple of that, and the number of segments, rounded up to 32 or a power of two;
with cuDNN from 9.24 and Transformer Engine from 2.18 a forward's has the exact number. So calls are padded with empty segments
to a class.

Tokens are not padded: classes of sums are wide, and a padded token would cost compute in every layer and iteration.
FlashAttention builds nothing for a shape, so its calls stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.plan.chunk import Chunk, Segment

_LEAST_TOKENS, _MOST_DOUBLED = 1 << 10, 1 << 15
"""Token counts up to which there is one class, and up to which classes are powers of two, as in Transformer Engine's source."""
LEAST_SEGMENTS = 32
"""Segments that any call is padded to; on a call of fewer, idle blocks end at once."""

WARM_UPS = ("auto", "on", "off")
"""Choices of warm-up: with kernels that build plans, with any, or with none."""


def token_class(count: int) -> int:
    """Return the class of a number of tokens: 1,024 or a power of two up to 32,768, then a multiple of 32,768."""
    return _power_of_two(count, _LEAST_TOKENS) if count <= _MOST_DOUBLED else -(-count // _MOST_DOUBLED) * _MOST_DOUBLED


def segment_class(count: int) -> int:
    """Return the class of a number of segments: `LEAST_SEGMENTS` or a power of two above it."""
    return _power_of_two(count, LEAST_SEGMENTS)


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << max(0, count - 1).bit_length())


def _first_of(tokens: int) -> int:
    if tokens > _MOST_DOUBLED:
        return tokens - _MOST_DOUBLED + 1
    return 1 if tokens == _LEAST_TOKENS else tokens // 2 + 1


class ShapeClass(NamedTuple):
    """Class of an attention call: number of segments, empty ones included, and classes of tokens without and with prefixes."""

    segments: int
    queries: int
    keys: int

    def smallest(self) -> Chunk:
        """Return a chunk of this class with about as few tokens and keys as it may have."""
        others = 0 if self.segments <= LEAST_SEGMENTS else self.segments // 2  # of a token each
        tokens = max(1, _first_of(self.queries) - others)
        keys = max(1, _first_of(self.keys) - others)  # fewer than tokens only without a causal mask
        return Chunk((Segment(0, keys - tokens, keys), *(Segment(1 + number, 0, 1) for number in range(others))))

    def longer_prefixes(self, longest: int) -> tuple[ShapeClass, ...]:
        """Return the classes of as many segments and tokens with any number of keys, up to the class of `longest` keys."""
        keys = [self.queries]
        while keys[-1] < token_class(longest):
            keys.append(token_class(keys[-1] + 1))
        return tuple(self._replace(keys=num_keys) for num_keys in keys)


def all_classes(most_tokens: int, longest: int) -> set[ShapeClass]:
    """Return the classes of few segments with up to `most_tokens` tokens behind a prefix of a sequence of `longest` tokens."""
    tokens = ShapeClass(LEAST_SEGMENTS, token_class(1), 0).longer_prefixes(most_tokens)
    chunks = [ShapeClass(LEAST_SEGMENTS, prefix.keys, 0) for prefix in tokens]
    return {shape for chunk in chunks for shape in chunk.longer_prefixes(max(longest, most_tokens))}


class CallSize(NamedTuple):
    """Size of a chunk's attention call: segments, one for padding included, and tokens without and with prefixes."""

    segments: int
    queries: int
    keys: int

    @property
    def shape_class(self) -> ShapeClass:
        return ShapeClass(segment_class(self.segments), token_class(self.queries), token_class(self.keys))
