"""Warm start: the search for the grain begins where batches of like shape ended."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from megatron_epp.planner.problem import Problem

Shape = tuple[int, ...]


@dataclass(slots=True)
class Warm:
    """Grains that earlier batches chose, by shape; the least recently used is forgotten.

    A plan made with it depends on the batches planned with it before, and a run that is resumed starts without. So only what
    plans against a deadline uses it (`Anytime`), which does not repeat anyway.
    """

    size: int = 64
    grains: OrderedDict[Shape, float] = field(default_factory=OrderedDict)

    def recall(self, problem: Problem) -> float | None:
        """Chunks aimed at by the last batch of this shape, or else by the last of all; None before the first."""
        shape = shape_of(problem)
        if shape in self.grains:
            self.grains.move_to_end(shape)
        return next(reversed(self.grains.values()), None)

    def remember(self, problem: Problem, grain: float) -> None:
        shape = shape_of(problem)
        self.grains[shape] = grain
        self.grains.move_to_end(shape)
        while len(self.grains) > self.size:
            self.grains.popitem(last=False)


def shape_of(problem: Problem) -> Shape:
    """Equal for batches whose tokens, longest sequence and number of sequences are within about a fifth, on one pipeline."""
    sizes = (sum(problem.lengths), max(problem.lengths), len(problem.lengths))
    return (*(int(4 * _log2(size)) for size in sizes), int(problem.forward_only), *problem.placement)


def _log2(size: int) -> float:
    """Straight lines between the powers of two: the same on every machine."""
    return size.bit_length() - 1 + size / (1 << (size.bit_length() - 1)) - 1
