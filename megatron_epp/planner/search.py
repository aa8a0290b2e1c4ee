"""Planners: each takes a problem, costs and options and returns its decisions. They differ in the tables they try."""

from __future__ import annotations

import math
from collections.abc import Callable

from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import Decisions
from megatron_epp.planner.chunking import Chunker, whole_sequences
from megatron_epp.planner.evaluate import lower_bound_us, makespan_us
from megatron_epp.planner.memory import fit_recompute
from megatron_epp.planner.order import Schedule, elastic_1f1b
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import tabulate
from megatron_epp.schedule import Chunk, InfeasibleError

Planner = Callable[[Problem, Costs, Options], Decisions]

GIB = 1 << 30
CHUNKS_PER_STAGE = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Grains the search may try: total work cut into that many chunks per stage. Coarser leaves bubbles, finer costs overhead."""
MOST_CHUNKS = 1024
"""No grain aims at more chunks than that."""
START = CHUNKS_PER_STAGE.index(4)
PATIENCE = 2
"""Grains in a row that may be no better before the search turns back."""
CLEARLY = 0.99
"""While nothing fits, a grain counts as better when its least peak is below this share of the least before."""


class Trials:
    """Chunk tables tried so far, and the best of them."""

    def __init__(self, problem: Problem, costs: Costs, options: Options, schedule: Schedule) -> None:
        self.problem, self.costs, self.options, self.schedule = problem, costs, options, schedule
        self.best: Decisions | None = None
        self.best_us = math.inf
        self.least_cap = 0
        self.seen: set[tuple[Chunk, ...]] = set()

    def better(self, chunks: tuple[Chunk, ...]) -> bool:
        """Try a table. True when it is faster than all before, or, while none fits, when it needs clearly less memory."""
        self.seen.add(chunks)
        tables = tabulate(chunks, self.problem, self.costs)
        if lower_bound_us(tables) >= self.best_us:
            return False
        order = self.schedule(chunks, self.problem.num_stages, self.problem.forward_only)
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


def greedy(problem: Problem, costs: Costs, options: Options, schedule: Schedule = elastic_1f1b) -> Decisions:
    """Slice, pack, order by elastic 1F1B, recompute as needed; the grain with the least simulated makespan wins.

    One whole sequence per chunk in batch order, which is plain 1F1B, is always among what is tried where the token cap lets
    it, so the result is never slower than that. With `options.slices` there is one grain and nothing to search.

    Raises:
        InfeasibleError: no grain fits the memory caps.
    """
    chunker = Chunker.of(problem, costs, options.chunk_tokens)
    trials = Trials(problem, costs, options, schedule)
    if options.slices is not None:
        trials.better(chunker.table(chunker.grain(slices=options.slices)))
        return trials.result()
    counts = [count for share in CHUNKS_PER_STAGE if (count := problem.num_stages * share) <= MOST_CHUNKS]
    for walk in (counts[START:], counts[START - 1 :: -1]):
        worse = 0
        for count in walk:
            chunks = chunker.table(chunker.grain(chunks=count))
            if chunks in trials.seen:
                continue
            worse = 0 if trials.better(chunks) else worse + 1
            if worse == PATIENCE:
                break
    whole = whole_sequences(problem.lengths)
    if max(problem.lengths) <= chunker.token_cap and whole not in trials.seen:
        trials.better(whole)
    return trials.result()


def baseline(schedule: Schedule) -> Planner:
    """A planner for whole sequences, one per chunk in batch order. It ignores `chunk_tokens` and `slices`."""

    def planner(problem: Problem, costs: Costs, options: Options) -> Decisions:
        trials = Trials(problem, costs, options, schedule)
        trials.better(whole_sequences(problem.lengths))
        return trials.result()

    return planner


PLANNERS: dict[str, Planner] = {"greedy": greedy, "1f1b": baseline(elastic_1f1b)}
"""Planners by name. A new schedule is a function (see `Schedule`) and an entry: `baseline(it)` to run whole sequences in it,
`partial(greedy, schedule=it)` to have chunks searched for it.
"""
