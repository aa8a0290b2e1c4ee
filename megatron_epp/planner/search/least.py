"""The least memory with which a batch can be planned, without the search for a fast plan.

With one stage per rank no order of a chunk table keeps less than that of `OrderRules.least`, so a table fits under a cap if and
only if it does in that order. One order of every table is tried, where `greedy` tries many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_epp.cost import Costs
from megatron_epp.plan import Plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.chunks.align import Aligned
from megatron_epp.planner.chunks.whole import plainly, tables_with_whole
from megatron_epp.planner.memory.messages import planned_with_room
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search.grains import first_grain, grain_counts, whole_bytes
from megatron_epp.planner.search.replicas import Chunkers, Replicas
from megatron_epp.planner.search.trials import Trials


def least_cap_bytes(problem: Problem, costs: Costs, options: Options, enough_bytes: int = 0) -> int:
    """Return the smallest memory cap, in bytes of every rank, under which a table of the batch fits, without offload.

    Messages have the room that is set aside for them before the order is known; those of a plan may need a little more.

    Args:
        problem: the batch and the placement, of one stage per rank; its caps do not matter.
        costs: time and memory of every stage.
        options: the user's settings.
        enough_bytes: a cap below which no smaller one is looked for.

    Raises:
        InfeasibleError, PlanError: as `plan` raises them where memory is not the obstacle.
    """
    validate(problem, costs, options)
    unfit = replace(problem, cap_bytes=(1,) * problem.num_ranks)
    trials = Trials(Replicas((unfit,), costs, options))
    for table in _tables(trials):
        trials.better(table, trials.rules.least)
        if trials.least_cap <= enough_bytes:
            break
    return trials.least_cap


def least_plan(problem: Problem, costs: Costs, options: Options) -> Plan:
    """Return the first plan found under the caps, which need not be a fast one. It proves that the batch fits.

    Args:
        problem: the batch, the placement, of one stage per rank, and its caps.
        costs, options: as for `least_cap_bytes`.

    Raises:
        InfeasibleError: no table fits; the error names the smallest cap that would do.
        PlanError: as `plan` raises it.
    """
    validate(problem, costs, options)

    def make(asked: Problem) -> Plan:
        trials = Trials(Replicas((asked,), costs, options))
        for table in _tables(trials):
            trials.better(table, trials.rules.least)
            if trials.best is not None:
                break
        found = trials.result()
        made = replace(found.only, order=found.complete) if found.complete else found.only
        return build_plan(asked, costs, options, made)

    return planned_with_room(problem, make)


def _tables(trials: Trials) -> Iterator[Aligned]:
    """Yield the tables that `greedy` tries: middling grains, finer and coarser ones, and tables with whole sequences."""
    replicas, problem = trials.replicas, trials.problem
    costs, options = replicas.costs, replicas.options
    for chunkers in replicas.shapes():
        yield from dict.fromkeys(_cut(chunkers, problem, options))
    if options.slices is None:
        if max(problem.lengths) <= (options.chunk_tokens or max(problem.lengths)):
            yield from (Aligned((whole,)) for whole in plainly(problem.lengths))
        if whole_bytes(trials) < trials.least_cap:
            yield from (Aligned((chunks,)) for chunks in tables_with_whole(problem, costs, options.chunk_tokens))


def _cut(chunkers: Chunkers, problem: Problem, options: Options) -> Iterator[Aligned]:
    if options.slices is not None:
        found = [chunkers.table(slices=options.slices)]
    else:
        counts = grain_counts(problem.num_ranks, chunkers.coarsest)
        start = first_grain(counts, problem.num_ranks)
        found = [chunkers.table(chunks=count) for count in (*counts[start:], *counts[:start][::-1])]
        found += [chunkers.table(slices=1)] if chunkers.is_even else []
    yield from (table for table in found if table is not None)
