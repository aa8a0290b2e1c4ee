"""Hanayo (arXiv 2308.15762, section 3) with one wave: two stages per rank in a V, and whatever is ready runs.

Kept: the wave and as many chunks alive as there are ranks. Changed: its order for equal microbatches follows from list
scheduling, which here has the chunks' own times. More waves, which turn round at either end again, are no placement of this
package.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.planner.orders.list_scheduling import ListScheduling
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch
from megatron_epp.planner.tabulate import tabulate


def hanayo(batch: Batch) -> Iterator[Order]:
    """Yield the order."""
    tables = tabulate(batch.chunks, batch.problem, batch.costs)
    yield ListScheduling(1, alternating=True).order(batch.chunks, tables, batch.problem)
