"""Chunks of a recipe: its sequences cut and packed, in every replica of a lockstep group alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_epp.plan import Chunk, Segment
from megatron_epp.planner.chunks.align import Aligned, align
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, Chunker, whole_sequences
from megatron_epp.planner.chunks.in_runs import LOCKSTEP_SHAPES, SHAPES, SHAPES_OF_SEVERAL, Shape, cut_in_runs, falling_times
from megatron_epp.planner.order import arranged, slice_groups
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.settings import (
    EQUAL_LENGTH,
    EVEN_TIME,
    LONGEST,
    MICROBATCH_STARTS,
    STARTS,
    WHOLE,
    Recipe,
)


class Cut(NamedTuple):
    """A way to cut a batch.

    Attributes:
        chunkers: of every replica.
        shape: of runs; None for slices that all sequences have in common.
    """

    chunkers: tuple[Chunker, ...]
    shape: Shape | None = None


class ChunkTables:
    """Chunk tables of a batch by recipe: makes and remembers them.

    Args:
        chunks: the only table, of one replica, whatever the recipe; None to cut the batch, or to run its microbatches.

    Attributes:
        cuts: by the setting `cut`.
    """

    def __init__(self, replicas: Replicas, chunks: tuple[Chunk, ...] | None = None) -> None:
        self.replicas, self.problem, self.options = replicas, replicas.problems[0], replicas.options
        variants, is_single = replicas.chunkers(), self.problem.has_one_stage_per_rank
        is_free = not (self.options.slices or self.options.chunk_tokens or self.problem.spans)
        shapes = LOCKSTEP_SHAPES if replicas.is_lockstep else SHAPES if is_single else SHAPES_OF_SEVERAL
        grains = {name: Cut(chunkers) for name, chunkers in zip((EVEN_TIME, EQUAL_LENGTH), variants, strict=False)}
        in_runs = {str(shape): Cut(variants[0], shape) for shape in shapes}
        # Of replicas in lockstep, one may have too few sequences for runs.
        self.cuts = grains if not is_free else in_runs | grains if replicas.is_lockstep else in_runs
        self._falling = [falling_times(chunker) for chunker in variants[0]]
        self._tables: dict[tuple[Any, ...], Aligned | None] = {}
        self._by_chunks: dict[tuple[Any, ...], Aligned] = {}
        self._by_start = {} if chunks is None else {STARTS[0]: Aligned((chunks,))}
        if self.problem.microbatches:
            orders = [microbatch_tables(problem) for problem in replicas.problems]
            runs = (1,) * len(orders[0][STARTS[0]]) if replicas.is_lockstep else ()
            for start in MICROBATCH_STARTS:
                table = Aligned(tuple(own[start] for own in orders), runs)
                self._by_start[start] = self._by_chunks.setdefault(table.chunks, table)

    def table(self, recipe: Recipe) -> Aligned | None:
        """Return the chunks of a recipe, always the same object; None where there are none."""
        if self._by_start:
            return self._by_start.get(recipe.start, self._by_start[STARTS[0]])
        key = recipe.grain, recipe.cut, recipe.start, recipe.copies in ("keys", "both")
        if key not in self._tables:
            table = self._cut_all(recipe) if recipe.start == STARTS[0] else self._with_start(recipe)
            self._tables[key] = None if table is None else self._by_chunks.setdefault(table.chunks, table)
        return self._tables[key]

    def _cut_all(self, recipe: Recipe) -> Aligned | None:
        chunkers, shape = self.cuts[recipe.cut]
        if shape is not None and recipe.grain > LONGEST:
            return cut_in_runs(chunkers, self._falling, recipe.grain * self.problem.num_ranks, shape)
        if recipe.grain == WHOLE and self.options.slices is None:
            every = zip(self.replicas.problems, chunkers, strict=True)
            whole = [whole_by_length(problem)[0] for problem, own in every if max(problem.lengths) <= own.token_cap]
            return align(whole, chunkers) if len(whole) == len(chunkers) else None
        for slices in range(self.options.slices or 1, 0, -1):  # fewer where a replica has too few tokens for another's
            tables = [self._cut_one(own, recipe, slices if self.options.slices else None) for own in chunkers]
            if len({table and len(table) for table in tables}) > 1 and not self.options.slices and recipe.grain != LONGEST:
                tables = [self._cut_one(own, recipe, None, in_lockstep=True) for own in chunkers]
            aligned = align([table for table in tables if table is not None], chunkers) if None not in tables else None
            if aligned is not None:
                return aligned
        return None

    def _cut_one(
        self, chunker: Chunker, recipe: Recipe, slices: int | None, *, in_lockstep: bool = False
    ) -> tuple[Chunk, ...] | None:
        """Cut one replica's batch; with a number of slices where the user fixed it, or for as many chunks as other replicas."""
        count, streams = recipe.grain * self.problem.num_ranks, recipe.copies in ("keys", "both")
        if slices is not None:
            grain = chunker.grain(slices=slices)
            return chunker.table_capped_at_twice_mean(grain) if streams else chunker.table(grain)
        if recipe.grain == LONGEST:
            return chunker.table(chunker.grain(slices=1))
        if count > MOST_CHUNKS:
            return None
        grain = chunker.lockstep_grain(count) if in_lockstep else chunker.grain(chunks=count)
        if streams:  # keys and values of equal pieces: short ones do not hide the copies
            return chunker.capped_at_twice_mean(grain).table(grain)
        return chunker.table(grain)

    def _with_start(self, recipe: Recipe) -> Aligned | None:
        """Move other sequences to the front of a table of one replica."""
        plain = self.table(recipe._replace(start=STARTS[0]))
        if plain is None or self.replicas.is_lockstep:
            return None
        (chunks,), groups = plain.chunks, self.problem.loss_groups
        if recipe.start == "shortest":
            runs = slice_groups(chunks, groups)[::-1] if recipe.grain <= LONGEST else ()
            return Aligned((tuple(chunks[c] for run in runs for c in run),)) if runs else None
        return Aligned((with_other_starts(chunks, self.problem.num_ranks, groups)[STARTS.index(recipe.start) - 1],))


def microbatch_tables(problem: Problem) -> dict[str, tuple[Chunk, ...]]:
    """Return a table of the microbatches for each of `MICROBATCH_STARTS`."""
    sequences: dict[int, list[int]] = {}
    for q, number in enumerate(problem.microbatches):
        sequences.setdefault(number, []).append(q)
    chunks = [Chunk(tuple(Segment(q, 0, problem.lengths[q]) for q in each)) for each in sequences.values()]
    work = {chunk: (sum(part.end**2 for part in chunk.segments), chunk.num_tokens) for chunk in chunks}
    falling, rising = (
        sorted(chunks, key=work.__getitem__, reverse=reverse) for reverse in (True, False)
    )  # equal ones as given
    return dict(zip(MICROBATCH_STARTS, map(tuple, (falling, rising, chunks)), strict=True))


def whole_by_length(problem: Problem) -> list[tuple[Chunk, ...]]:
    """Return two tables of whole sequences, one per chunk: longest first, and shortest first."""
    lengths, chunks = problem.lengths, whole_sequences(problem.lengths)
    rising = tuple(chunks[q] for q in sorted(range(len(lengths)), key=lambda q: (lengths[q], q)))
    return [arranged(table, problem.loss_groups) for table in (rising[::-1], rising)]


def with_other_starts(
    chunks: Sequence[Chunk], num_ranks: int, loss_groups: Sequence[int] = ()
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the same chunks with other sequences before the longest: some of one chunk each, or the next longest.

    Args:
        chunks: the chunk table, longest sequence first.
        num_ranks: ranks of the pipeline; a pipeline is full with about as many chunks.
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
