"""Comparison of a baseline's candidates by the rules for every planner, and chunks of a fixed number of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.first_fit import first_fit, joined, longest_first
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.chunks.chunker import MOST_CHUNKS, round_up
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import is_within, peaks_bytes
from megatron_epp.planner.infeasible import infeasible
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.validation import require_one_stage_per_rank


class Contest:
    """Candidates for one batch: the fastest that fits so far, and where none fits the smallest cap that would do."""

    def __init__(self, problem: Problem, costs: Costs, options: Options, *, any_placement: bool = False) -> None:
        if not any_placement:
            require_one_stage_per_rank(problem, options)
        self.problem, self.costs, self.options = problem, costs, options
        self.best: Decisions | None = None
        self.best_us = math.inf
        self.needed_bytes = 0

    def tables(self, chunks: Sequence[Chunk]) -> Tables:
        return tabulate(chunks, self.problem, self.costs)

    def enter(self, decisions: Decisions, tables: Tables) -> bool:
        """Judge a candidate: True if it fits the caps, whether or not it is the fastest. Otherwise its peak is recorded."""
        peaks = peaks_bytes(decisions.order, tables, decisions.recompute_steps)
        if not is_within(peaks, self.problem.cap_bytes):
            self.would_do(max(peaks))
            return False
        took_us = makespan_us(decisions.order, tables, decisions.recompute_steps)
        if took_us < self.best_us:
            self.best, self.best_us = decisions, took_us
        return True

    def would_do(self, cap: int) -> None:
        """Record a cap, in bytes per rank, under which some candidate fits."""
        self.needed_bytes = min(cap, self.needed_bytes or cap)

    def result(self) -> Decisions:
        """The fastest candidate. Raises `InfeasibleError` with a cap that would have let one through."""
        if self.best is not None:
            return self.best
        raise infeasible(self.problem, self.costs, self.options, self.needed_bytes)


def own_recompute_only(options: Options) -> None:
    """Raise `PlanError` if the user fixed the recompute that a planner chooses itself."""
    if options.recompute != "auto":
        text = f"planner {options.planner!r} chooses recompute itself; it cannot take {options.recompute} layers"
        raise PlanError(text, Remedy("set", "recompute", "auto"))


def context_tokens(problem: Problem, options: Options) -> int:
    """Return the tokens of a row, padded: the context, or the longest sequence. Raises `InfeasibleError` for a longer one."""
    longest = max(problem.lengths)
    context = longest if options.context is None else options.context
    if longest > context:
        text = f"planner {options.planner!r} does not cut sequences: one of {longest} tokens does not fit rows of {context}"
        raise InfeasibleError(text, Remedy("raise", "context", longest))
    return round_up(context, problem.token_multiple)


def even_rows(lengths: Sequence[int], work: Sequence[float], room: int, count: int) -> tuple[Chunk, ...] | None:
    """Put whole sequences, by falling work, into the row with the least so far; None where a row would be empty or too long."""
    rows: list[list[int]] = [[] for _ in range(count)]
    loads, tokens = [0.0] * count, [0] * count
    for q in sorted(range(len(lengths)), key=lambda q: (-work[q], q)):
        open_rows = [row for row in range(count) if tokens[row] + lengths[q] <= room]
        if not open_rows:
            return None
        row = min(open_rows, key=lambda row: (loads[row], row))
        rows[row].append(q)
        loads[row] += work[q]
        tokens[row] += lengths[q]
    return joined({}, rows, lengths) if all(rows) else None


def fixed_size_chunks(lengths: Sequence[int], size: int, *, standalone: bool = False) -> tuple[Chunk, ...]:
    """Slices of `size` tokens, sequences with the most slices first, and short sequences, first fit.

    In batch order, short ones fill up the last slices too; `standalone` ones, longest first, have chunks of their own.
    """
    sequences = longest_first(lengths) if standalone else range(len(lengths))
    long = sorted((q for q in sequences if lengths[q] > size), key=lambda q: -(-lengths[q] // size), reverse=True)
    boundaries = {q: [*range(0, lengths[q], size), lengths[q]] for q in long}
    tails = [size if standalone else lengths[q] - boundaries[q][-2] for q in long]
    return joined(boundaries, first_fit((q for q in sequences if lengths[q] <= size), lengths, size, tails), lengths)


def chunk_sizes(problem: Problem, options: Options) -> list[int]:
    """Fixed chunk sizes worth trying: the one the user gave, or powers of two from a single chunk to `MOST_CHUNKS`, falling."""
    multiple = problem.token_multiple
    if options.chunk_tokens is not None:
        return [options.chunk_tokens // multiple * multiple]
    total = sum(problem.lengths)
    powers = [1 << power for power in range(total.bit_length(), 0, -1) if (1 << power) * MOST_CHUNKS >= total]
    return list(dict.fromkeys(round_up(size, multiple) for size in powers if size >= min(256, total)))
