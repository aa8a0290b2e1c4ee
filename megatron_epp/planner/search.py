"""Planners: each takes a problem, costs and options and returns its decisions. They differ in the tables they try."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import Decisions
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunking import Chunker, whole_sequences
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.memory import fit_recompute
from megatron_epp.planner.order import Schedule, Stairs, elastic_1f1b
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.weight import split_weights
from megatron_epp.schedule import Chunk, InfeasibleError

Planner = Callable[[Problem, Costs, Options], Decisions]

GIB = 1 << 30
CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Grains the search may try: total work cut into that many chunks per stage. Coarser leaves bubbles, finer costs overhead."""
MOST_CHUNKS = 1024
"""No grain aims at more chunks than that."""
FIRST: tuple[Schedule, ...] = (Stairs(late=True, slope=2), Stairs(late=False, slope=2))
"""What every grain is tried with."""
SECOND: tuple[Schedule, ...] = (
    Stairs(late=True, slope=1.5),
    Stairs(late=True, slope=1),
    Stairs(late=False, slope=1.5),
    Stairs(late=False, slope=1),
    elastic_1f1b,
)
"""What the best grain is tried with besides, or all grains when none fits: less alive, less slack."""
PATIENCE = 2
"""Grains in a row that may be no better before the search turns back."""
CLEARLY = 0.99
"""While nothing fits, a grain counts as better when its least peak is below this share of the least before."""


class Trials:
    """Candidates tried so far, and the best of them."""

    def __init__(self, problem: Problem, costs: Costs, options: Options) -> None:
        self.problem, self.costs, self.options = problem, costs, options
        self.best: Decisions | None = None
        self.best_us = math.inf
        self.least_cap = 0
        self.seen: set[tuple[tuple[Chunk, ...], Schedule]] = set()

    def better(self, chunks: tuple[Chunk, ...], schedules: Sequence[Schedule]) -> bool:
        """Try a table. True when it is faster than all before, or, while none fits, when it needs clearly less memory."""
        schedules = [schedule for schedule in schedules if (chunks, schedule) not in self.seen]
        if not schedules:
            return False
        tables = tabulate(chunks, self.problem, self.costs)
        if lower_bound_us(tables, chunks, self.problem, self.options) >= self.best_us:
            return False
        found = [self._better(chunks, tables, schedule) for schedule in schedules]
        return any(found)

    def _better(self, chunks: tuple[Chunk, ...], tables: Tables, schedule: Schedule) -> bool:
        self.seen.add((chunks, schedule))
        order = schedule(chunks, self.problem.num_stages, self.problem.forward_only)
        fit = fit_recompute(order, tables, self.problem.cap_bytes, self.options)
        if fit.layers is None:
            before = self.least_cap or math.inf
            self.least_cap = int(min(before, fit.needed_bytes))
            return self.best is None and fit.needed_bytes < CLEARLY * before
        took_us = makespan_us(order, tables, fit.layers)
        if took_us >= self.best_us:
            return False
        self.best, self.best_us = Decisions(chunks, order, fit.layers), took_us
        return True

    def result(self) -> Decisions:
        """The best decisions. Raises `InfeasibleError` with the smallest cap that would have let one table through."""
        if self.best is not None:
            return self.best
        gib = -(-self.least_cap * 100 // GIB) / 100
        raise InfeasibleError(
            f"no plan fits a memory cap of {min(self.problem.cap_bytes)} bytes per rank: the least that would do is "
            f"{self.least_cap} bytes ({gib:.2f} GiB).\n"
            f"Raise --epp-memory-cap-gb to {gib:.2f}, or lower --epp-chunk-tokens or --seq-length."
        )


def greedy(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Slice, pack, order in stairs, recompute as needed; grain and stairs with the least simulated makespan win.

    One whole sequence per chunk, which is plain 1F1B, is always among what is tried where the token cap lets
    it, so the result is never slower than that. With `options.slices` there is one grain and nothing to search.

    Raises:
        InfeasibleError: no grain fits the memory caps.
    """
    chunker = Chunker.of(problem, costs, options.chunk_tokens)
    trials = Trials(problem, costs, options)
    if options.slices is not None:
        trials.better(chunker.table(chunker.grain(slices=options.slices)), (*FIRST, *SECOND))
        return finished(trials.result(), problem, costs, options)
    counts = [count for share in CHUNKS_PER_STAGE if (count := problem.num_stages * share) <= MOST_CHUNKS]
    start = min(CHUNKS_PER_STAGE.index(12), len(counts) - 1)
    for walk in (counts[start:], counts[start - 1 :: -1] if start else []):
        worse = 0
        for count in walk:
            worse = 0 if trials.better(chunker.table(chunker.grain(chunks=count)), FIRST) else worse + 1
            if worse == PATIENCE:
                break
    if trials.best is not None:
        trials.better(trials.best.chunks, SECOND)
    else:
        for count in counts:
            trials.better(chunker.table(chunker.grain(chunks=count)), SECOND)
    whole = whole_sequences(problem.lengths)
    if max(problem.lengths) <= chunker.token_cap:
        trials.better(whole, (elastic_1f1b,))
    return finished(trials.result(), problem, costs, options)


def finished(made: Decisions, problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Split weight gradients off where that is asked for, the costs tell them apart and it is faster."""
    if not options.split_weight or not costs.splits_weight or problem.forward_only:
        return made
    tables = tabulate(made.chunks, problem, costs)
    order = split_weights(made.order, tables, made.layers, problem.cap_bytes)
    if makespan_us(order, tables, made.layers) >= makespan_us(made.order, tables, made.layers):
        return made
    return replace(made, order=order)


def baseline(schedule: Schedule) -> Planner:
    """A planner for whole sequences, one per chunk in batch order. It ignores `chunk_tokens` and `slices`."""

    def planner(problem: Problem, costs: Costs, options: Options) -> Decisions:
        trials = Trials(problem, costs, options)
        trials.better(whole_sequences(problem.lengths), (schedule,))
        return trials.result()

    return planner


PLANNERS: dict[str, Planner] = {"greedy": greedy, "1f1b": baseline(elastic_1f1b)}
"""Planners by name. A new schedule is a function (see `Schedule`) and an entry: `baseline(it)` to run whole sequences in it,
`partial(greedy, schedule=it)` to have chunks searched for it.
"""
