"""Chunks of a recipe: its sequences cut and packed, in every replica of a lockstep group alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from megatron_epp.cost.model import Costs
from megatron_epp.features import batch_target
from megatron_epp.plan import Chunk, InfeasibleError, Segment
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, whole_sequences
from megatron_epp.planner.chunks.in_runs import (
    LOCKSTEP_SHAPES,
    SHAPES,
    SHAPES_OF_SEVERAL,
    SLICED_SHAPES,
    Aligned,
    Shape,
    cut_in_runs,
    falling_times,
)
from megatron_epp.planner.order import arranged, slice_groups
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.settings import LONGEST, MICROBATCH_STARTS, STARTS, STREAMING, WHOLE, Recipe


class ChunkTables:
    """Chunk tables of a batch by recipe: makes and remembers them, by the setting `cut`.

    `chunks` is the only table, of one replica, whatever the recipe; None to cut the batch, or to run its microbatches.
    """

    def __init__(self, replicas: Replicas, chunks: tuple[Chunk, ...] | None = None) -> None:
        self.replicas, self.problem, self.options = replicas, replicas.problems[0], replicas.options
        self.chunkers = replicas.chunkers()
        shapes: Sequence[Shape] = SHAPES if self.problem.has_one_stage_per_rank else SHAPES_OF_SEVERAL
        shapes = LOCKSTEP_SHAPES if replicas.is_lockstep else shapes
        self.cuts = {str(shape): shape for shape in (SLICED_SHAPES if self.options.slices else shapes)}
        self._falling = [*map(falling_times, self.chunkers)]
        self._total_us = max(chunker.total_us for chunker in self.chunkers)
        self._longest_us = max(chunker.longest_us for chunker in self.chunkers)
        self._tables: dict[tuple[Any, ...], Aligned | None] = {}
        self._by_chunks: dict[tuple[Any, ...], Aligned] = {}
        self._by_start = {} if chunks is None else {STARTS[0]: Aligned((chunks,))}
        if self.problem.microbatches:
            orders = [microbatch_tables(problem) for problem in replicas.problems]
            runs = (1,) * len(orders[0][STARTS[0]]) if replicas.is_lockstep else ()
            for start in MICROBATCH_STARTS:
                table = Aligned(tuple(own[start] for own in orders), runs)
                self._by_start[start] = self._by_chunks.setdefault(table.chunks, table)
        if self.options.slices and replicas.is_lockstep and self.table(Recipe(cut=str(SLICED_SHAPES[0]))) is None:
            self.cuts = {str(shape): shape for shape in shapes}  # a replica has too few sequences for chunks of whole ones

    def table(self, recipe: Recipe) -> Aligned | None:
        """Return the chunks of a recipe, always the same object; None where there are none."""
        if self._by_start:
            return self._by_start.get(recipe.start, self._by_start[STARTS[0]])
        key = recipe.grain, recipe.cut, recipe.start, recipe.copies in STREAMING
        if key not in self._tables:
            table = self._cut_all(recipe) if recipe.start == STARTS[0] else self._with_start(recipe)
            self._tables[key] = None if table is None else self._by_chunks.setdefault(table.chunks, table)
        return self._tables[key]

    def _cut_all(self, recipe: Recipe) -> Aligned | None:
        shape, slices, streams = self.cuts[recipe.cut], self.options.slices, recipe.copies in STREAMING
        total_us, longest_us = self._total_us, self._longest_us
        if slices is not None:  # fewer where a replica has too few tokens for another's
            counts = (total_us / longest_us * count for count in range(slices, 0, -1))
            tables = (cut_in_runs(self.chunkers, self._falling, count, shape, 1, streams) for count in counts)
            return next((table for table in tables if table is not None), None)
        if recipe.grain == WHOLE:
            return self._whole()
        count = total_us / longest_us if recipe.grain == LONGEST else recipe.grain * self.problem.num_ranks
        return cut_in_runs(self.chunkers, self._falling, count, shape, streams=streams)

    def _whole(self) -> Aligned | None:
        problems = self.replicas.problems
        is_within = all(max(chunker.problem.lengths) <= chunker.token_cap for chunker in self.chunkers)
        if not is_within or len({len(problem.lengths) for problem in problems}) > 1 or self.problem.borrowed:
            return None
        tables = tuple(whole_by_length(problem)[0] for problem in problems)
        if len(tables) == 1:
            return Aligned(tables)
        every = zip(tables, (problem.loss_groups for problem in problems), strict=True)
        begins = set.intersection(*({run.start for run in slice_groups(*of)} for of in every))
        return Aligned(tables, tuple(stop - start for start, stop in pairwise([*sorted(begins), len(tables[0])])))

    def _with_start(self, recipe: Recipe) -> Aligned | None:
        plain = self.table(recipe._replace(start=STARTS[0]))
        if plain is None or self.replicas.is_lockstep:
            return None
        (chunks,), groups = plain.chunks, self.problem.loss_groups
        if recipe.start == "shortest":
            runs = slice_groups(chunks, groups)[::-1] if recipe.grain <= LONGEST else ()
            return Aligned((tuple(chunks[c] for run in runs for c in run),)) if runs else None
        return Aligned((with_other_starts(chunks, self.problem.num_ranks, groups)[STARTS.index(recipe.start) - 1],))


def chunks_of(problem: Problem, costs: Costs, options: Options, chunks: float) -> tuple[Chunk, ...]:
    """Cut a batch into about so many chunks that take equally long, or as `options.slices` and `options.chunk_tokens` say.
    Raises `InfeasibleError` if there are too many.
    """
    table = ChunkTables(Replicas((problem,), costs, options)).table(Recipe(chunks / problem.num_ranks, str(Shape(1))))
    if table is None:
        raise InfeasibleError(f"{chunks:g} chunks are more than the {MOST_CHUNKS} that a plan may have")
    return table.chunks[0]


def microbatch_tables(problem: Problem) -> dict[str, tuple[Chunk, ...]]:
    """Return a table of the microbatches for each of `MICROBATCH_STARTS`."""
    sequences: dict[int, list[int]] = {}
    for q, number in enumerate(problem.microbatches):
        sequences.setdefault(number, []).append(q)
    chunks = [Chunk(tuple(Segment(q, problem.first_token(q), problem.lengths[q]) for q in each)) for each in sequences.values()]
    work = {chunk: (sum(part.end**2 for part in chunk.segments), chunk.num_tokens) for chunk in chunks}
    falling, rising = (
        sorted(chunks, key=work.__getitem__, reverse=reverse) for reverse in (True, False)
    )  # equal ones as given
    in_turn = batch_target(problem, "in_turn") or (lambda table, problem: tuple(table))
    return {start: in_turn(table, problem) for start, table in zip(MICROBATCH_STARTS, (falling, rising, chunks), strict=True)}


def whole_by_length(problem: Problem) -> list[tuple[Chunk, ...]]:
    """Return two tables of whole sequences, one per chunk: longest first, and shortest first."""
    lengths, chunks = problem.lengths, whole_sequences(problem.lengths)
    rising = tuple(chunks[q] for q in sorted(range(len(lengths)), key=lambda q: (lengths[q], q)))
    return [arranged(table, problem.loss_groups) for table in (rising[::-1], rising)]


def with_other_starts(
    chunks: Sequence[Chunk], num_ranks: int, loss_groups: Sequence[int] = ()
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the same chunks, the longest sequence first, with others ahead: some of one chunk each, or the next longest.

    About as many chunks go ahead as there are ranks, with which a pipeline is full.
    """
    groups = [tuple(chunks[c] for c in run) for run in slice_groups(chunks, loss_groups)]
    single = [group for group in groups if len(group) == 1]
    first, second = single[:num_ranks], list[tuple[Chunk, ...]]()
    for group in groups[1:]:
        if sum(map(len, second)) >= 2 * num_ranks:
            break
        second.insert(0, group)
    single_first = [*first, *(group for group in groups if len(group) > 1), *single[num_ranks:]]
    second_first = [*second, *groups[:1], *groups[len(second) + 1 :]]
    return tuple(tuple(chunk for group in order for chunk in group) for order in (single_first, second_first))
