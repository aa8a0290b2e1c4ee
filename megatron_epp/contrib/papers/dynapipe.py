"""DynaPipe (arXiv 2311.10418, sections 4 and 5): microbatches by dynamic programming over sorted sequences, a cyclic order.

Kept: sequences sorted by length are divided into microbatches so that ``sum(t) + (p - 1) max(t)`` is least; in the order every
rank runs, in each cycle, one backward and one forward that were ready when the cycle began, and delays forwards for which it
lacks memory. Changed: sequences of a microbatch are packed, not padded to the longest. The bound on a microbatch's
memory is tried in halves, since recompute is chosen with the plan. Microbatches run longest first, while the paper tries
permutations of groups of them. With `Options.slices` or a token cap longer sequences are cut first; the paper cuts none.
Replicas are balanced before planning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from megatron_epp.contrib.papers.fixed_order import Batch, ChunkTable
from megatron_epp.contrib.papers.partition import Times, least_latency
from megatron_epp.contrib.papers.slices import Slicer, slice_boundaries
from megatron_epp.cost.model import Costs
from megatron_epp.cost.work import causal_pairs
from megatron_epp.plan import Action, Op
from megatron_epp.plan.first_fit import joined, longest_first
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import round_up, slowest_line
from megatron_epp.planner.order import Order, descending
from megatron_epp.planner.tables import tabulate

HALVINGS = 4
"""Times that the bound on the tokens of a microbatch is halved."""
LAYERS = (0.0, 0.5, 1.0)
"""Shares of the layers that recompute, for the memory of an order."""
ROOM = (1.0, 0.8, 0.6)
"""Shares of the room for activations that an order may take: the rest is for the layer that a backward is at."""


def sorted_microbatches(problem: Problem, costs: Costs, options: Options) -> Iterator[ChunkTable]:
    """Yield chunk tables of microbatches of least latency, with ever fewer tokens at most."""
    slicer, lengths = Slicer.of(problem, costs, options.chunk_tokens), problem.lengths
    ends = slicer.slice_ends(slicer.grain(slices=options.slices or 1).slices)
    falling = longest_first(lengths)
    boundaries = slice_boundaries(ends, [q for q in falling if lengths[q] > ends[0]], lengths)
    whole = falling[len(boundaries) :]
    times_us, tokens = _times(problem, costs, [lengths[q] for q in whole])
    divisions: dict[ChunkTable, None] = {}
    for halving in range(HALVINGS + 1):
        most = max(round_up(ends[0], problem.token_multiple), int(tokens[0, -1]) >> halving)
        allowed = (tokens > 0) & (tokens <= min(most, slicer.token_cap))
        chosen = least_latency(np.where(allowed, times_us, np.inf), problem.num_stages) if whole else []
        batched = [whole[start:stop] for start, stop in pairwise([0, *chosen])]
        divisions[joined(boundaries, [*([] for _ in boundaries), *batched], lengths)] = None
    yield from divisions


def _times(problem: Problem, costs: Costs, lengths: Sequence[int]) -> tuple[Times, NDArray[np.int64]]:
    """Compute time in microseconds and padded tokens of falling sequences from one to before another, ``[from][to]``."""
    line, multiple = slowest_line(problem, costs)[0], problem.token_multiple
    tokens = np.cumsum([0, *lengths], dtype=np.int64)
    pairs = np.cumsum([0, *(causal_pairs(0, length) for length in lengths)], dtype=np.int64)
    padded = -(-(tokens - tokens[:, None]) // multiple) * multiple
    return np.asarray(line.time_us(padded, pairs - pairs[:, None]), dtype=np.float64), padded


def cyclic(batch: Batch) -> Iterator[Order]:
    """Yield the order without limits of memory, and orders within shares of the caps with more or less recompute."""
    tables = tabulate(batch.chunks, batch.problem, batch.costs)
    orders = {_Cycles(batch, None, []).run(): None}
    for layers, share in product(LAYERS, ROOM):
        activations = [
            [int(tables.passes[stage].ways.kept_bytes[c, int(layers * count)]) for c in range(batch.num_chunks)]
            for stage, count in enumerate(tables.num_layers)
        ]
        room = [share * (cap - static) for cap, static in zip(batch.problem.cap_bytes, tables.static, strict=True)]
        orders[_Cycles(batch, activations, room).run()] = None
    yield from orders


class _Cycles:
    """Run of a pipeline in cycles, in which every rank runs at most one backward and one forward.

    Args:
        batch: the chunk table, one stage on each rank.
        activations: bytes that every chunk keeps on every stage; None for no limit.
        room: bytes of every rank for these.
    """

    def __init__(self, batch: Batch, activations: list[list[int]] | None, room: Sequence[float]) -> None:
        ranks = batch.placement.num_ranks
        self._kept = activations or [[0] * batch.num_chunks] * ranks
        self._room = room if activations else [math.inf] * ranks
        self._backwards, self._total = descending(batch.groups), batch.num_chunks
        self._needed = [group.stop for group in batch.groups for _ in group]
        self._forwarded, self._reversed = [0] * ranks, [0] * ranks
        self._held = [0] * ranks

    def run(self) -> Order:
        """Return the order of every rank's actions."""
        rows: list[list[Action]] = [[] for _ in self._held]
        while self._reversed[0] < self._total:
            forwarded, backward = [self._total, *self._forwarded], [*self._reversed, math.inf]
            for rank, row in enumerate(rows):
                at = self._reversed[rank]
                is_last = rank == len(rows) - 1
                if at < self._total and at < backward[rank + 1] and (not is_last or self._backwards[at] < forwarded[-1]):
                    row.append(Action(Op.B, rank, self._backwards[at]))
                    self._reversed[rank] += 1
                    self._held[rank] -= self._kept[rank][self._backwards[at]]
                at = self._forwarded[rank]
                if at < forwarded[rank] and at < self._total and self._has_room(rank, at):
                    row.append(Action(Op.F, rank, at))
                    self._forwarded[rank] += 1
                    self._held[rank] += self._kept[rank][at]
        return tuple(map(tuple, rows))

    def _has_room(self, rank: int, chunk: int) -> bool:
        """Return True if a rank has room for a chunk, or if its next backward needs that."""
        done = self._reversed[rank]
        is_needed = done < self._total and chunk < self._needed[done]
        return is_needed or self._held[rank] + self._kept[rank][chunk] <= self._room[rank]
