"""Hanayo (arXiv 2308.15762, section 3) with one wave: two stages per rank in a V, and whatever is ready runs.

Kept: the wave. Changed: its order for as many microbatches as ranks follows from list scheduling, which here has the chunks'
own times; for more chunks several windows are tried. More waves, which turn round at either end again, are no placement of
this package.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.features.stages.list_scheduling import ListScheduling
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import tabulate

WINDOWS = (2.5, 2, 1.5, 1)
"""Chunks alive on a rank's first stage at most, in multiples of the ranks."""


def hanayo(batch: Batch) -> Iterator[Order]:
    """Yield an order for every window."""
    tables = tabulate(batch.chunks, batch.problem, batch.costs)
    for window in WINDOWS:
        yield ListScheduling(window, alternating=True).order(batch.chunks, tables, batch.problem)
