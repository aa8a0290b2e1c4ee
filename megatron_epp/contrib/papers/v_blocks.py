"""V-Min and V-Half (Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3).

Kept: two stages per rank in a V and the paper's building blocks, which are repeated every six units of time, each weight
gradient in the first free unit; then actions move to earlier units where the memory of the repeated blocks allows it. Changed:
the authors move actions around the steady phase, and actions after it a second time; here one rule moves all, and ranks
wait as long or shorter. A unit is a chunk of any length, so units take unequal time, and the repeated blocks are tried unmoved
too. The first backward of a sequence follows the forwards of all its slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.contrib.papers.squeezed import laid_out, squeezed
from megatron_epp.features.stages.stage_orders import in_blocks
from megatron_epp.planner.order import Order


def repeated(name: str, batch: Batch) -> Iterator[Order]:
    """Yield the order of a building block repeated for every chunk, squeezed and as it is.

    Args:
        name: of the block, in `features.stages.stage_orders.BLOCKS`.
    """
    late, blocks, own = batch.most_slices - 1, range(batch.num_chunks), batch.placement
    later = [block + late for block in blocks]
    rows = [in_blocks(name, own, rank, batch.groups, blocks, later) for rank in range(own.num_ranks)]
    yield squeezed(rows)
    yield laid_out(rows)


v_min, v_half = partial(repeated, "V-Min"), partial(repeated, "V-Half")
