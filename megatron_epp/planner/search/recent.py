"""Batches planned before: their results, and the grains that they chose."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from megatron_epp.plan import Chunk
from megatron_epp.planner.chunks.chunker import longest_first
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Problem

Shape = tuple[int, ...]
SHAPES = 64
"""Shapes of batches whose grains are kept; a shape spans a fifth of the tokens, the longest sequence and the count. Not
measured: a grain is a number, and a batch without one of its own shape begins at the last batch's.
"""


@dataclass(slots=True)
class Recent[K, V]:
    """Cache that drops the least recently used entry."""

    capacity: int = 1024
    entries: OrderedDict[K, V] = field(default_factory=OrderedDict)

    def recall(self, key: K) -> V | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def remember(self, key: K, value: V) -> None:
        self.entries[key] = value
        self.entries.move_to_end(key)
        while len(self.entries) > self.capacity:
            self.entries.popitem(last=False)


class Warm:
    """Warm start: grains that earlier batches chose, by shape; the search begins where batches of similar shape ended.

    A plan made with it depends on the batches planned with it before, and a run that is resumed starts without. So only what
    plans against a deadline uses it (`Anytime`), which does not repeat anyway.
    """

    def __init__(self) -> None:
        self.grains = Recent[Shape, float](SHAPES)

    def recall(self, problem: Problem) -> float | None:
        """Chunks aimed at by the last batch of this shape, or else by the last of all; None before the first."""
        self.grains.recall(shape_of(problem))
        return next(reversed(self.grains.entries.values()), None)

    def remember(self, problem: Problem, grain: float) -> None:
        self.grains.remember(shape_of(problem), grain)


def shape_of(problem: Problem) -> Shape:
    """Equal for batches whose tokens, longest sequence and number of sequences are within about a fifth, on one pipeline."""
    sizes = (sum(problem.lengths), max(problem.lengths), len(problem.lengths))
    return (*(int(4 * _log2(size)) for size in sizes), int(problem.forward_only), *problem.placement)


def _log2(size: int) -> float:
    """Straight lines between the powers of two: the same on every machine."""
    return size.bit_length() - 1 + size / (1 << (size.bit_length() - 1)) - 1


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the same batch with the longest sequence first, and the original index of each of its sequences."""
    sequences = tuple(longest_first(problem.lengths))
    return problem.part(sequences), sequences


def relabelled(made: Decisions, sequences: tuple[int, ...]) -> Decisions:
    """Renumber the sequences of a canonical batch's decisions as in the original batch."""
    chunks = (Chunk(tuple(s._replace(sequence=sequences[s.sequence]) for s in chunk.segments)) for chunk in made.chunks)
    kv_offload = frozenset((stage, sequences[sequence]) for stage, sequence in made.kv_offload)
    return replace(made, chunks=tuple(chunks), kv_offload=kv_offload)
