"""V-Min and V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3).

Kept: two stages per rank in a V and the paper's building blocks, which are repeated every six units of time, each weight
gradient in the first free unit. Changed: a unit is a chunk of any length, so units take unequal time. The first backward of a
sequence follows the forwards of all its slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from megatron_epp.plan import Op
from megatron_epp.planner.orders.patterns import in_blocks
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch


def v_min(batch: Batch) -> Iterator[Order]:
    """Yield the order of V-Min, which keeps a third of the activations of 1F1B."""
    yield _order("V-Min", batch)


def v_half(batch: Batch) -> Iterator[Order]:
    """Yield the order of V-Half, which keeps half of the activations of 1F1B."""
    yield _order("V-Half", batch)


def _order(name: str, batch: Batch) -> Order:
    late, blocks, rows = batch.most_slices - 1, range(batch.num_chunks), []
    for rank in range(batch.placement.num_ranks):
        taken = in_blocks(name, batch.placement, rank, batch.groups, blocks, [block + late for block in blocks])
        for unit, action in sorted(taken.items()):
            if action.op is Op.B:
                free = next(later for later in count(unit + 1) if later not in taken)
                taken[free] = action._replace(op=Op.W)
        rows.append(tuple(taken[unit] for unit in sorted(taken)))
    return tuple(rows)
