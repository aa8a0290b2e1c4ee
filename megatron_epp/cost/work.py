"""Work of a chunk on a stage (tokens, query-key pairs, position in a sliced sequence), and times that depend on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import add
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.problem import Spans, TrainedParts
from megatron_epp.plan.sizing import size_classes

IntColumn = NDArray[np.int64]
BoolColumn = NDArray[np.bool_]
TimeColumn = NDArray[np.floating[Any]]


def causal_pairs(start: int, end: int) -> int:
    """Number of query-key pairs of tokens ``[start, end)``, which attend to all tokens of their sequence up to themselves."""
    return (end * (end + 1) - start * (start + 1)) // 2


def span_work(spans: Spans, start: int, end: int) -> float:
    """Work of the spans that begin among tokens ``[start, end)`` of their sequence."""
    return sum(span.work for span in spans if start <= span.start < end)


def trained_tokens(parts: TrainedParts, length: int, start: int, end: int) -> float:
    """Number of trained tokens among ``[start, end)`` of a sequence, if they are spread evenly over each of its `parts`."""

    def before(token: int) -> float:
        whole, rest = divmod(token * len(parts), length)
        return sum(parts[:whole]) + (parts[whole] * rest / length if rest else 0.0)

    return before(end) - before(start)


def tokens_and_pairs(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Count the tokens, and their query-key pairs, of parts ``[start, end)`` of sequences."""
    tokens, pairs = zip((0, 0), *((end - start, causal_pairs(start, end)) for start, end in parts), strict=True)
    return sum(tokens), sum(pairs)


@dataclass(frozen=True, slots=True)
class LinearTime:
    """Time of one pass: ``max(launch_us, fixed_us + per_token_us * tokens + per_pair_us * pairs + per_read_us * reads)``."""

    fixed_us: float = 0.0
    per_token_us: float = 0.0
    per_pair_us: float = 0.0
    # Time in which the host launches the pass's kernels, which the device cannot be ahead of; 0 where the host is the device,
    # or where it is unknown
    launch_us: float = 0.0
    per_read_us: float = 0.0  # for a token ahead of a slice, of which attention makes keys and values (latents)

    @overload
    def time_us(self, tokens: float, pairs: float, reads: float = 0) -> float: ...
    @overload
    def time_us(self, tokens: IntColumn, pairs: IntColumn, reads: IntColumn | int = 0) -> TimeColumn: ...
    def time_us(self, tokens: Any, pairs: Any, reads: Any = 0) -> Any:
        """Time in microseconds; of a slice, `reads` are the tokens ahead of it, of the same shape."""
        return self.launched(self.device_us(tokens, pairs, reads))

    def device_us(self, tokens: Any, pairs: Any, reads: Any = 0) -> Any:
        """Time on the device alone, in microseconds; arguments as in `time_us`."""
        return self.fixed_us + self.per_token_us * tokens + self.per_pair_us * pairs + self.per_read_us * reads

    def launched(self, device_us: Any) -> Any:
        """Time of a pass whose kernels take `device_us`, a number or a column, and at least as long as launching them."""
        if not self.launch_us:
            return device_us
        return np.maximum(device_us, self.launch_us) if isinstance(device_us, np.ndarray) else max(device_us, self.launch_us)

    def scaled(self, factor: float) -> LinearTime:
        return LinearTime(*(own * factor for own in self._coefficients))

    def within(self, whole: LinearTime) -> LinearTime:
        """Return the line with each coefficient limited to the coefficient of the line that it is a part of."""
        return LinearTime(*map(min, self._coefficients, whole._coefficients))

    def without(self, part: LinearTime) -> LinearTime:
        """Return the line less a part of it; no coefficient is below zero."""
        return LinearTime(*(max(0.0, own - less) for own, less in zip(self._coefficients, part._coefficients, strict=True)))

    def __add__(self, other: LinearTime) -> LinearTime:
        return LinearTime(*map(add, self._coefficients, other._coefficients))

    @property
    def _coefficients(self) -> tuple[float, ...]:
        return self.fixed_us, self.per_token_us, self.per_pair_us, self.launch_us, self.per_read_us


NO_TIME = LinearTime()


@dataclass(frozen=True, slots=True)
class ModeCosts:
    """A layer in a recompute mode: time to recompute, and bytes kept for backward, K and V included if it keeps them.

    `full_bytes_per_token` is the peak during its backward; None if it equals that of a layer that keeps everything.
    """

    again: LinearTime
    bytes_per_token: float
    full_bytes_per_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWork:
    """The work of the chunks of a table, as columns with one entry per chunk."""

    tokens: IntColumn  # after padding
    pairs: IntColumn  # causal query-key pairs; padding attends to nothing
    sliced: BoolColumn  # the chunk holds a slice of a longer sequence (split and hybrid chunks)
    # first, last: it holds the first slice, whose forward allocates the sequence's keys and values, or the last, whose backward
    # allocates their gradient
    first: BoolColumn
    last: BoolColumn
    prefix_tokens: IntColumn  # of that sequence, ahead of the slice; `num_slices` likewise. Both are zero without a slice.
    # Of its key and value cache: all padded tokens of its chunks, including the short sequences in the same chunk as the last
    # slice. Zero without a slice, or if the cache is offloaded.
    cache_tokens: IntColumn
    num_slices: IntColumn
    # `first`, `cache_tokens` and `num_slices` of a sequence that begins behind the slice's and goes on, whose keys and values
    # are copied to a cache of their own; None without any
    begun: ChunkWork | None = None
    trained: TimeColumn | None = None  # tokens that count in the loss, which alone pass the output layer; None for all
    # span_work, span_kept: of the spans that a chunk holds (`TokenSpan`); None without any
    span_work: TimeColumn | None = None
    span_kept: TimeColumn | None = None
    kv_offload_costs: Callable[..., Any] | None = None  # the function of `kv_costs` where sequences share prefixes
    summed_tokens: IntColumn | None = None  # of those, tokens whose sums of gradients a pass loads from host memory

    @property
    def kv_offload(self) -> BoolColumn:
        """True for chunks with a slice whose keys and values are offloaded to the host."""
        return np.asarray(self.sliced & (self.cache_tokens == 0), dtype=np.bool_)

    @property
    def outputs_per_token(self) -> TimeColumn | float:
        """Rows of logits for each token, for which memory is set aside."""
        return 1.0

    @property
    def gathered_tokens(self) -> IntColumn:
        """Tokens whose keys and values a pass puts together besides those in the cache."""
        return np.zeros(len(self.tokens), dtype=np.int64)

    @property
    def repeated_tokens(self) -> IntColumn:
        """Tokens that a pass would put together again for other segments, which read one row for all (but of latents)."""
        return np.zeros(len(self.tokens), dtype=np.int64)

    def offloading(self, slices: Mapping[int, Sequence[int]]) -> tuple[ChunkWork, ChunkWork, BoolColumn]:
        """Return the work without the caches of some of `slices_in`, that by which these stream, and the chunks that do."""
        which = np.isin(range(len(self.tokens)), [c for own in slices.values() for c in own])
        return replace(self, cache_tokens=np.where(which, 0, self.cache_tokens)), self, which

    def handed(self, state_tokens: int) -> tuple[TimeColumn, BoolColumn | IntColumn]:
        """Numbers of states that chunks keep, where one behind fewer tokens is a part, and of slices that go on from one."""
        goes_on = self.sliced & ~self.last | (False if self.begun is None else self.begun.sliced)
        share = np.minimum(1.0, (self.prefix_tokens + self.tokens) / max(1, state_tokens))
        return np.where(goes_on, share, 0.0), self.sliced & ~self.first

    def opened_cache(self, size: Sizes) -> IntColumn:
        """Bytes of keys and values for which a forward makes room, and which its backward frees."""
        return size(size_classes(self.cache_tokens)) * self.first

    def released_cache(self, size: Sizes) -> IntColumn:
        """Bytes of keys and values that a forward frees where no backward follows."""
        return size(size_classes(self.cache_tokens)) * self.last

    def opened_gradients(self, size: Sizes) -> IntColumn:
        """Bytes of their gradient for which a backward makes room."""
        return size(self.cache_tokens) * self.last

    def closed_gradients(self, size: Sizes) -> IntColumn:
        """Bytes of their gradient that a backward frees."""
        return size(self.cache_tokens) * self.first


Sizes = Callable[[IntColumn], IntColumn]
"""Function from numbers of tokens to their bytes."""


class LayerPeak(NamedTuple):
    """Peak memory of a layer while its backward runs, as columns over chunks.

    Of this, `gradient` is for accumulated gradients of keys and values, which remain allocated, and `prefix` for that gradient
    as attention's backward makes it (`kv_costs.prefix_bytes`).
    """

    num_bytes: IntColumn
    gradient: IntColumn
    prefix: IntColumn


def work_of(
    chunks: Sequence[Chunk],
    lengths: Sequence[int],
    token_multiple: int = 1,
    trained: Sequence[TrainedParts] = (),
    spans: Sequence[Spans] = (),
) -> ChunkWork:
    """Derive the work of every chunk. Without `trained` all tokens are trained, and without `spans` there are none."""
    tokens = [chunk.padded_tokens(token_multiple) for chunk in chunks]
    slices, begun = ([getattr(chunk, name)(lengths) for chunk in chunks] for name in ("slice_of", "begun_of"))
    slices_of = Counter(part.sequence for part in (*slices, *begun) if part is not None)
    cache_of = Counter[int]()
    for own, part, starts in zip(tokens, slices, begun, strict=True):
        cache_of.update({} if part is None else {part.sequence: own})
        cache_of.update({} if starts is None else {starts.sequence: starts.num_tokens})

    def summed(of: Callable[..., float]) -> NDArray[Any]:
        return np.array([sum(of(*part) for part in chunk.segments) for chunk in chunks])

    def columns(parts: Sequence[Segment | None]) -> dict[str, Any]:
        return {
            "sliced": np.array([part is not None for part in parts], dtype=np.bool_),
            "first": np.array([part is not None and part.start == 0 for part in parts], dtype=np.bool_),
            "last": np.array([part is not None and part.end == lengths[part.sequence] for part in parts], dtype=np.bool_),
            "prefix_tokens": np.array([0 if part is None else part.start for part in parts], dtype=np.int64),
            "cache_tokens": np.array([0 if part is None else cache_of[part.sequence] for part in parts], dtype=np.int64),
            "num_slices": np.array([0 if part is None else slices_of[part.sequence] for part in parts], dtype=np.int64),
        }

    none = np.zeros(len(chunks), dtype=np.int64)
    return ChunkWork(
        **columns(slices),
        begun=ChunkWork(tokens=none, pairs=none, **columns(begun)) if any(begun) else None,
        tokens=np.array(tokens, dtype=np.int64),
        pairs=summed(lambda _, start, end: causal_pairs(start, end)).astype(np.int64),
        trained=summed(lambda at, *ends: trained_tokens(trained[at], lengths[at], *ends)) if trained else None,
        span_work=summed(lambda at, *ends: span_work(spans[at], *ends)) if spans else None,
        span_kept=summed(lambda at, *ends: sum(s.kept for s in spans[at] if ends[0] <= s.start < ends[1])) if spans else None,
    )


def joined_work(works: Sequence[ChunkWork]) -> ChunkWork:
    """Join the columns of several tables: of all of them, or of none, the trained tokens and the spans are known."""
    rows = {field.name: [getattr(work, field.name) for work in works] for field in fields(ChunkWork) if field.name != "begun"}
    columns: dict[str, Any] = {name: np.concatenate(own) for name, own in rows.items() if any(x is not None for x in own)}
    if any(work.begun for work in works):
        names = columns.keys() - {"trained", "span_work", "span_kept"}
        nothing = (ChunkWork(**{name: getattr(work, name) & False for name in names}) for work in works)
        columns["begun"] = joined_work([work.begun or none for work, none in zip(works, nothing, strict=True)])
    return ChunkWork(**columns)
