"""List scheduling in units of time on two stages per rank in a V, in which F, B and W take one each (ZB-V, 2401.10241)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.plan import Chunk
from megatron_epp.planner.kernels.compiled import floats
from megatron_epp.planner.order import Order, slice_groups
from megatron_epp.planner.orders.list_scheduling import ListScheduling, order_of, ready_of
from megatron_epp.planner.orders.patterns import is_v
from megatron_epp.planner.problem import Problem
from megatron_epp.planner.tables import Tables


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Order rule for two stages per rank in a V. Elsewhere it is list scheduling.

    A rank prefers a backward, then a forward while it keeps few enough chunks, then the weight gradient that has waited
    longest. Sequences with slices have as many more forwards alive, since the first backward follows the forwards of all
    slices.
    """

    def order(self, chunks: Sequence[Chunk], tables: Tables, problem: Problem) -> Order:
        """Order all actions. Arguments as in `OrderRule.order`."""
        if not is_v(problem) or not tables.backward_us:
            return ListScheduling(2, alternating=True).order(chunks, tables, problem)
        total, longest = len(chunks), max(map(len, slice_groups(chunks)))
        items = problem.num_stages * total
        unit = floats([1.0] * items)
        return order_of(
            ready_of(chunks, tables, ListScheduling(total, waiting=total))._replace(
                forward_us=unit,
                backward_us=unit,
                weight_us=unit,
                hop_us=floats([0.0] * items),
                most_kept=2 * (problem.num_ranks + longest - 1),
            )
        )
