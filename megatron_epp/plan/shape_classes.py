"""Classes of shapes for which libraries build kernel plans, so that a new batch rarely has a new one.

cuDNN, through Transformer Engine, compiles a plan for every shape class of an attention call, which takes tens to hundreds of
milliseconds, and keeps it for the thread that asked. By its source its classes are:

- cuDNN from 9.6 (*ragged* log-sum-exp): sums of query tokens and of keys, each to 1,024, to a power of two up to 32,768, or to
  a multiple of that; segments to 32 or a power of two.
- The same with cuDNN from 9.24 and Transformer Engine from 2.18: the forward takes the number of segments as it is.
- cuDNN before 9.6, and GPUs of compute capability 12.0 (*dense* log-sum-exp, as long for every segment as for the longest): the
  number of segments and the longest ones' queries and keys, all as they are.

So calls are padded with empty segments to a class of their number, and with a dense log-sum-exp the longest lengths, which only
bound the launch, are rounded up to classes. Tokens are not padded: classes of sums are wide enough, and a padded token would
cost compute in every layer and iteration. FlashAttention builds nothing for a shape, so its calls stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.plan.chunk import Chunk, Segment

_LEAST_TOKENS, _MOST_DOUBLED = 1 << 10, 1 << 15
_LEAST_LENGTH = 128
_LEAST_SEGMENTS = 32


def token_class(count: int, least: int = _LEAST_TOKENS) -> int:
    """Return the class of a number of tokens: `least` or a power of two up to 32,768, then a multiple of 32,768."""
    return _power_of_two(count, least) if count <= _MOST_DOUBLED else -(-count // _MOST_DOUBLED) * _MOST_DOUBLED


def segment_class(count: int, least: int = _LEAST_SEGMENTS) -> int:
    """Return the class of a number of segments: `least` or a power of two above it."""
    return _power_of_two(count, least)


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << max(0, count - 1).bit_length())


class ShapeClass(NamedTuple):
    """Class of an attention call, for which a library builds one plan.

    Attributes:
        segments: number of segments, empty ones included.
        queries: tokens of all segments, or with a dense log-sum-exp of the longest one.
        keys: keys of all segments, prefixes included, or of the one that has most.
        is_dense: the log-sum-exp is dense.
    """

    segments: int
    queries: int
    keys: int
    is_dense: bool = False

    def smallest(self) -> Chunk:
        """Return a chunk of this class with about as few tokens and keys as it may have."""
        least = 1 if self.is_dense else _LEAST_SEGMENTS
        others = 0 if self.segments <= least else self.segments // 2  # of a token each
        counted = 0 if self.is_dense else others
        tokens = max(1, _first_of(self.queries) - counted)
        keys = max(tokens, _first_of(self.keys) - counted)
        rest = (Segment(1 + number, 0, 1) for number in range(others))
        return Chunk((Segment(0, keys - tokens, keys), *rest))


def _first_of(tokens: int) -> int:
    """Return the smallest number of tokens in a class; 1 for the first one."""
    if tokens > _MOST_DOUBLED:
        return tokens - _MOST_DOUBLED + 1
    return 1 if tokens in (_LEAST_TOKENS, _LEAST_LENGTH) else tokens // 2 + 1


class CallSize(NamedTuple):
    """Size of the attention call of a chunk.

    Attributes:
        segments: number of segments, the one of padding included.
        queries, keys: tokens of all segments, and the same with their prefixes.
        longest_query, longest_key: the most of any segment.
    """

    segments: int
    queries: int
    keys: int
    longest_query: int
    longest_key: int

    def ragged(self) -> ShapeClass:
        """Return the class of a call with a ragged log-sum-exp."""
        return ShapeClass(segment_class(self.segments), token_class(self.queries), token_class(self.keys))

    def dense(self) -> ShapeClass:
        """Return the class of a call with a dense log-sum-exp."""
        longest = (token_class(count, _LEAST_LENGTH) for count in (self.longest_query, self.longest_key))
        return ShapeClass(segment_class(self.segments, 1), *longest, is_dense=True)


def call_size(chunk: Chunk, padded_tokens: int) -> CallSize:
    """Return the size of the attention call of a chunk whose token count was padded to `padded_tokens`."""
    padding = padded_tokens - chunk.num_tokens
    lengths = [(one.num_tokens, one.end) for one in chunk.segments] + ([(padding, padding)] if padding else [])
    queries, keys = zip(*lengths, strict=True)
    return CallSize(len(lengths), sum(queries), sum(keys), max(queries), max(keys))
