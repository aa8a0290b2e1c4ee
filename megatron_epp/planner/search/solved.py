"""Batches solved before, told apart by their lengths in any order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from megatron_epp.plan import Chunk
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Problem


@dataclass(slots=True)
class Solved[T]:
    """Cache of results for canonical problems (see `canonical`), dropping the least recently used."""

    capacity: int = 1024
    decisions: OrderedDict[Problem, T] = field(default_factory=OrderedDict)

    def recall(self, asked: Problem) -> T | None:
        if asked in self.decisions:
            self.decisions.move_to_end(asked)
        return self.decisions.get(asked)

    def remember(self, asked: Problem, made: T) -> None:
        self.decisions[asked] = made
        self.decisions.move_to_end(asked)
        while len(self.decisions) > self.capacity:
            self.decisions.popitem(last=False)


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """Return the same batch with the longest sequence first, and the original index of each of its sequences."""
    lengths = problem.lengths
    sequences = tuple(sorted(range(len(lengths)), key=lambda q: (-lengths[q], q)))
    return replace(problem, lengths=tuple(lengths[q] for q in sequences)), sequences


def relabelled(made: Decisions, sequences: tuple[int, ...]) -> Decisions:
    """Renumber the sequences of decisions for a canonical batch by those of the original."""
    chunks = (Chunk(tuple(s._replace(sequence=sequences[s.sequence]) for s in chunk.segments)) for chunk in made.chunks)
    hosted = frozenset((stage, sequences[sequence]) for stage, sequence in made.hosted)
    return replace(made, chunks=tuple(chunks), hosted=hosted)
