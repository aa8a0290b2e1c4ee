"""ChronosPipe (arXiv 2503.03182): two stages per rank, a chunk's backward as soon after its forward as ranks can have it.

Kept: Chronos-Pipe's aim, short lifetimes of activations on two stages of each rank; Chronos-Recomp: the shallow stages, whose
activations live longest, recompute first, and deep stages only where that does not suffice; and offload by lifetime. With
`Options.offload` activations are copied, required by a cap or not, of shallow stages first, as far as the link has time for.

Changed: the order is ours, since this is written from the abstract and summaries of the paper, without its figures. It has the
least distances of a building block of F and B that take one and two units of time. Chronos-Offload moves weights and optimizer
state of deep layers, which are needed after the longest time; plans copy activations only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from megatron_epp.contrib.papers.copies import copied
from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.spacing import whole_backwards
from megatron_epp.cost.model import Costs
from megatron_epp.features.copies.ahead import longest_lived_shares
from megatron_epp.plan import Chunk
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.fit import by_stage, fit_with_copies
from megatron_epp.planner.fitted import fitted
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables, tabulate


def chronos(batch: Batch) -> Iterator[Order]:
    """Yield the order, with whole backwards."""
    yield whole_backwards(batch.groups, batch.placement)


def shallow_then_all(tables: Tables) -> tuple[RecomputeSteps, RecomputeSteps]:
    """Return the most recompute steps ``[stage][chunk]`` if only each rank's first stage recomputes, and if all do."""
    most = by_stage(tables.columns.most, tables.num_chunks)
    shallow = {stages[0] for stages in tables.stages_of}
    return [row if stage in shallow else [0] * len(row) for stage, row in enumerate(most)], most


def shallow_first(order: Order, chunks: Sequence[Chunk], problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Recompute layers of each rank's first stage alone if that fits the caps; otherwise as `fitted`, with its errors.

    Arguments as in `fitted`.
    """
    if options.recompute == "auto" and not problem.forward_only:
        tables = tabulate(chunks, problem, costs, options.modes(costs.recompute_modes))
        codes, (limit, _) = encode(order, len(chunks)), shallow_then_all(tables)
        steps = [[0] * len(chunks) for _ in range(problem.num_stages)]
        caps = zip(codes.starts, codes.starts[1:], problem.cap_bytes, strict=False)
        if all(
            fit_with_copies(codes, tables, rank, [cap] * (stop - start), limit, steps)
            for rank, (start, stop, cap) in enumerate(caps)
        ):
            return Decisions(tuple(chunks), order, steps, options.modes(costs.recompute_modes))
    return fitted(order, chunks, problem, costs, options)


longest_lived_first = partial(copied, longest_lived_shares, limits=shallow_then_all, otherwise=shallow_first)
"""Copies of each rank's first stage, then of its second, and recompute of the first alone where that fits; as `fitted`."""
