"""Baselines as a training run uses them: one setting, fixed in its launch flags, for every batch that may come.

Chosen for each batch anew, chunk size and recompute would be a planner of their own. A run of Seq1F1B, ChunkFlow or packed 1F1B
takes one chunk size and one recompute setting, tuned on a sample of batches, and they must fit the worst batch too: one with a
sequence of the context length. (InfiniPipe's evaluation runs its Seq1F1B so: 2509.21275, section V.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_epp.contrib.papers.chunkflow import budgets, recompute_all_but_last
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, InfeasibleError, PlanError
from megatron_epp.plan.first_fit import pack_whole
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import chunk_sizes, context_tokens, fixed_size_chunks
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.fit import peaks_bytes, uniform_steps
from megatron_epp.planner.order import Order, slice_groups
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.tables import Tables, tabulate

FIXED = ("seq1f1b", "chunkflow", "1f1b-packed", "1f1b-padded")
"""Planners that a run fixes a setting for. Those that plan every batch are not among them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings fixed by the launch flags.

    Attributes:
        chunk_tokens: of a chunk; None for planners of whole sequences.
        recompute: layers of every stage and chunk; None for ChunkFlow.
        retain: ChunkFlow's K: chunks of a sequence that keep their activations; None for the others.
    """

    chunk_tokens: int | None = None
    recompute: int | None = None
    retain: int | None = None

    def layers(self, chunks: Sequence[Chunk], tables: Tables) -> RecomputeSteps:
        """Recomputed layers ``[stage][chunk]``."""
        if self.retain is not None:
            return recompute_all_but_last(chunks, tables.num_layers, self.retain)
        return uniform_steps(tables, self.recompute or 0)


@dataclass(frozen=True, slots=True)
class FixedRun:
    """The best setting, what it decides for every batch, and the makespans that follow."""

    setting: Setting
    decisions: tuple[Decisions, ...]
    makespan_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Arranged:
    """One batch with chunks and order, recompute still open."""

    chunks: tuple[Chunk, ...]
    order: Order
    problem: Problem
    tables: Tables

    def fits(self, setting: Setting) -> bool:
        peaks = peaks_bytes(self.order, self.tables, setting.layers(self.chunks, self.tables))
        return all(peak <= cap for peak, cap in zip(peaks, self.problem.cap_bytes, strict=True))

    def makespan_us(self, setting: Setting) -> float:
        return makespan_us(self.order, self.tables, setting.layers(self.chunks, self.tables))

    def decisions(self, setting: Setting) -> Decisions:
        layers = setting.layers(self.chunks, self.tables)
        return Decisions(self.chunks, self.order, layers, token_multiple=self.problem.token_multiple)


def fixed_run(batches: Sequence[Problem], worst: Sequence[Problem], costs: Costs, options: Options) -> FixedRun:
    """Try all settings and keep the one with the least total time over `batches` that fits these and `worst`.

    Args:
        worst: batches that must fit too.
        options: `planner`, one of `FIXED`, and `context` are read.

    Raises:
        InfeasibleError: no setting fits all batches.
        PlanError: the planner is not one of these.
    """
    if options.planner not in FIXED:
        raise PlanError(f"planner {options.planner!r} has no setting to fix for a run; {', '.join(FIXED)} have")
    best: tuple[Setting, list[_Arranged]] | None = None
    best_us = math.inf
    problems = [*batches, *worst]
    largest = max(problems, key=lambda problem: sum(problem.lengths))
    for size in chunk_sizes(largest, options) if options.planner in ("seq1f1b", "chunkflow") else (None,):
        arranged = [_arrange(problem, costs, options, size) for problem in problems]
        sample = arranged[: len(batches)]
        if sum(lower_bound_us(batch.tables) for batch in sample) >= best_us:
            continue
        # From fast to slow, so the first that fits is this size's best.
        setting = next(
            (s for s in _settings(options.planner, arranged, size) if all(batch.fits(s) for batch in arranged)), None
        )
        if setting is not None and (took_us := sum(batch.makespan_us(setting) for batch in sample)) < best_us:
            best, best_us = (setting, sample), took_us
    if best is None:
        cap = min(largest.cap_bytes)
        raise InfeasibleError(f"no setting of {options.planner!r} fits a memory cap of {cap} bytes per rank in all batches")
    setting, sample = best
    return FixedRun(
        setting, tuple(batch.decisions(setting) for batch in sample), tuple(batch.makespan_us(setting) for batch in sample)
    )


def _arrange(problem: Problem, costs: Costs, options: Options, size: int | None) -> _Arranged:
    if options.planner == "1f1b-padded":
        problem = replace(problem, token_multiple=context_tokens(problem, options))
    chunks = _chunks(problem, options, size)
    if options.planner == "chunkflow":
        order = elastic_1f1b(chunks, problem.num_stages, problem.forward_only)
    else:
        order = seq1f1b_order(slice_groups(chunks), problem.num_stages, problem.forward_only)
    return _Arranged(chunks, order, problem, tabulate(chunks, problem, costs))


def _chunks(problem: Problem, options: Options, size: int | None) -> tuple[Chunk, ...]:
    if options.planner == "1f1b-padded":
        return whole_sequences(problem.lengths)
    if size is None:
        return pack_whole(problem.lengths, context_tokens(problem, options))
    return fixed_size_chunks(problem.lengths, size, standalone=options.planner == "chunkflow")


def _settings(planner: str, arranged: Sequence[_Arranged], size: int | None) -> list[Setting]:
    """With chunks of one size, from least recompute to most."""
    if planner == "chunkflow":
        most = max(len(group) for batch in arranged for group in slice_groups(batch.chunks))
        return [Setting(size, retain=retain) for retain in budgets(most)]
    return [Setting(size, recompute=count) for count in range(max(arranged[0].tables.num_layers) + 1)]
