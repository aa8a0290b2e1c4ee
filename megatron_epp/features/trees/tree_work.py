"""Work of chunks whose sequences share prefixes: every segment's keys and values stay from its forward to its backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_epp.cost.kv_costs import CopyTime, KVBytes, KVOffloadCosts
from megatron_epp.cost.work import BoolColumn, ChunkWork, IntColumn, Sizes, TimeColumn, work_of
from megatron_epp.features.cascade.common_rows import common_rows
from megatron_epp.features.trees.readers import groups_of, reads_of
from megatron_epp.features.trees.state_cuts import Part, cut_chunks
from megatron_epp.plan import Chunk, Plan, Segment
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.problem import Problem
from megatron_epp.planner.order import descending

if TYPE_CHECKING:
    from megatron_epp.runtime.handover import Cut


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWork(ChunkWork):
    """The work of the chunks of a table. `prefix_tokens` are in front of all of a chunk's segments."""

    # Tokens of the segments of each chunk, ``[segment, chunk]``, the padding with the first; 0 where there is none
    segments: IntColumn
    # last_reader, first_backward: the chunk whose forward is the last to read a segment's keys and values, and the one whose
    # backward is the first; its own where no other reads them. Of the same shape.
    last_reader: IntColumn
    first_backward: IntColumn
    is_read: IntColumn  # 1 for segments that others read
    repeated: IntColumn
    is_whole: bool  # chunks are whole microbatches, which have logits of all tokens of their sequences
    # Of the states of a chunk the tokens ahead, and how often they are kept, ``[2, state, chunk]``, 0 where there is none; and
    # the number of its parts that begin with a state. A function, since few models have any.
    states: Callable[[], tuple[IntColumn, IntColumn]]
    # From sequences in host memory to `offloaded`, and to the tokens there that each chunk reads of others
    placed: Callable[[Collection[int]], tuple[IntColumn, IntColumn]]
    offloaded: IntColumn  # tokens of segments in host memory, of the shape of `segments`

    def offloading(self, slices: Mapping[int, Sequence[int]]) -> tuple[TreeWork, TreeWork, BoolColumn]:
        offloaded, read = self.placed(slices)
        summed = read + offloaded.sum(axis=0)
        away = replace(self, offloaded=offloaded, summed_tokens=summed, kv_offload_costs=_host_costs)
        return away, away, summed > 0

    def handed(self, state_tokens: int) -> tuple[TimeColumn, IntColumn]:
        (tokens, times), entered = self.states()
        return np.sum(np.minimum(1.0, tokens / max(1, state_tokens)) * times, axis=0), entered

    @property
    def gathered_tokens(self) -> IntColumn:
        return np.asarray(self.prefix_tokens + self.tokens - self.repeated)

    @property
    def outputs_per_token(self) -> TimeColumn | float:
        return (self.prefix_tokens + self.tokens) / self.tokens if self.is_whole else 1.0

    @property
    def repeated_tokens(self) -> IntColumn:
        return self.repeated

    def opened_cache(self, size: Sizes) -> IntColumn:
        return np.sum(size(self.segments - self.offloaded), axis=0)

    def released_cache(self, size: Sizes) -> IntColumn:
        return self._at(self.last_reader, size, self.segments - self.offloaded)

    def opened_gradients(self, size: Sizes) -> IntColumn:
        return self._at(self.first_backward, size, (self.segments - self.offloaded) * self.is_read)

    def closed_gradients(self, size: Sizes) -> IntColumn:
        return np.sum(size((self.segments - self.offloaded) * self.is_read), axis=0)

    @staticmethod
    def _at(chunks: IntColumn, size: Sizes, tokens: IntColumn) -> IntColumn:
        sizes = size(tokens)
        total = np.zeros(sizes.shape[1], dtype=sizes.dtype)
        np.add.at(total, chunks, sizes)
        return total


def _states_of(chunks: Sequence[Chunk], borrowed: Sequence[Borrowed]) -> tuple[IntColumn, IntColumn]:
    parts, others = cut_chunks(chunks, borrowed)
    last = {part.before: part for own in parts for part in own}
    rows = [*zip_longest(*(_kept(own, others, last) for own in parts), fillvalue=(0, 0))]
    entered = np.array([sum(part.before is not None for part in own) for own in parts], dtype=np.int64)
    return np.array(rows, dtype=np.int64).reshape(-1, len(chunks), 2).transpose(2, 0, 1), entered


def _kept(parts: Sequence[Part], others: Counter[Cut], last: Mapping[Cut | None, Part]) -> Iterator[tuple[int, int]]:
    """Yield an entry of `TreeWork.states` for each state of a chunk.

    Every part that begins with a state has a copy of its rows in front of its own. That of the `last` one of several chunks
    takes the place of the state. Of these some may have run backward ahead of the others' forwards, so it is there with the sum
    of gradients. A sum of two or more is in fp32, which takes twice the bytes of rows in half precision. A recurrence's state,
    which parts need not copy, is counted as rows are: too high where several chunks begin with one.
    """
    for part in parts:
        if part.before is not None:
            yield part.tokens.start, int(part is not last[part.before] or not others[part.before])
        if part.behind is not None:
            yield part.tokens.end, min(3, others[part.behind])


def _host_costs(
    cached: KVBytes, layers: float, _passes: object, work: TreeWork, copy_us: CopyTime, _fragmentation_share: float
) -> KVOffloadCosts:
    """Compute what it takes that attention waits for a layer's rows. Sums of gradients are in `BlockCosts.prefix_bytes`."""
    own, size, sums = work.offloaded.sum(axis=0), cached.bytes_per_token, cached.gradient_per_token(work)
    every: IntColumn = work.summed_tokens if work.summed_tokens is not None else own
    read = every - own
    in_us = copy_us(size, read) * (read > 0)
    cache_bytes, gradient_bytes = (np.ceil(layers * each * own).astype(np.int64) for each in (size, sums))
    return KVOffloadCosts(
        forward_us=layers * (in_us + copy_us(size, own) * (own > 0)),
        backward_us=layers * (copy_us(size + sums, every) + copy_us(sums, read)),
        again_us=in_us,
        forward_bytes=0 * own,
        backward_bytes=0 * own,
        cache_bytes=cache_bytes,
        gradient_bytes=gradient_bytes,
    )


def work_of_tree(chunks: Sequence[Chunk], batch: Plan | Problem, *facts: Any) -> TreeWork:
    """Derive the work of every chunk; `facts` are the arguments of `cost.work.work_of` behind its chunks."""
    plain, reads = work_of(chunks, *facts), reads_of(chunks, batch.borrowed)
    readers = Counter(part for parts in reads.values() for part, _ in parts)
    last, first = (
        {part: c for c in order for segment in chunks[c].segments for part, _ in reads[segment]}
        for order in (range(len(chunks)), descending(groups_of(chunks, batch))[::-1])
    )
    every, padding = np.ones(len(chunks), dtype=np.bool_), plain.tokens - [chunk.num_tokens for chunk in chunks]
    nothing = Segment(-1, 0, 0)
    rows = [*zip_longest(*(chunk.segments for chunk in chunks), fillvalue=nothing)]
    segments = np.array([[segment.num_tokens for segment in row] for row in rows], dtype=np.int64)
    holders = np.array([[segment.sequence for segment in row] for row in rows], dtype=np.int64)
    is_read = np.array([[int(segment in readers) for segment in row] for row in rows], dtype=np.int64)
    lent, read_by = segments * is_read, [[0] * len(chunks) for _ in batch.lengths]  # tokens that chunks read of a sequence
    for c, chunk in enumerate(chunks):
        for part in {part for segment in chunk.segments for part, _ in reads[segment]}.difference(chunk.segments):
            read_by[part.sequence][c] += part.num_tokens
    read = np.array(read_by, dtype=np.int64)
    segments[0] += padding
    columns = {field.name: getattr(plain, field.name) for field in fields(ChunkWork)} | {
        "sliced": every,
        "first": every,
        "last": ~every,
        "begun": None,
        "prefix_tokens": np.array([sum(part.start for part in chunk.segments) for chunk in chunks], dtype=np.int64),
        "cache_tokens": plain.tokens,
        "num_slices": np.full(len(chunks), 1 + max(readers.values(), default=0)),
    }
    return TreeWork(
        **columns,
        segments=segments,
        is_whole=isinstance(batch, Problem) and bool(batch.microbatches),
        last_reader=np.array([[last.get(segment, c) for c, segment in enumerate(row)] for row in rows], dtype=np.int64),
        first_backward=np.array([[first.get(segment, c) for c, segment in enumerate(row)] for row in rows], dtype=np.int64),
        states=cache(partial(_states_of, chunks, batch.borrowed)),
        placed=lambda sequences: (lent * np.isin(holders, [*sequences]), read[[*sequences]].sum(axis=0)),
        offloaded=0 * segments,
        is_read=is_read,
        repeated=np.array([sum(rows.saved for rows in common_rows(c.segments, reads)) for c in chunks], dtype=np.int64),
    )
