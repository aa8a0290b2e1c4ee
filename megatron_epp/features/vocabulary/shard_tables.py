"""Vocabulary shards in the planner's tables, from the rows of their operations by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from operator import sub

import numpy as np

from megatron_epp.plan import Op
from megatron_epp.plan.operations import OperationRows

MOST_OPEN_CHUNKS = 3
"""Chunks that a rank may have between the `S` and `T` of its vocabulary shard: one runs, one is being reduced, one waits."""


def turn_us(added: Mapping[Op, OperationRows]) -> list[float]:
    """Least time by chunk from the last stage's forward to the gradient of its output: broadcast, shards, reductions, loss."""
    shards, (loss_us,) = added[Op.S], added[Op.N].time_us
    slowest: list[float] = np.max(shards.time_us, axis=0).tolist()
    moved = map(sum, zip(shards.collective_us[Op.SPREAD], shards.collective_us[Op.GATHER], strict=True))
    return [sum(parts) for parts in zip(slowest, moved, loss_us, strict=True)]


def shard_peaks(added: Mapping[Op, OperationRows], trains: bool) -> list[list[int]]:
    """Return the most bytes that each chunk takes on a rank in its `S`, or when any `T` runs behind it, ``[rank][chunk]``."""
    shards, gradients = added[Op.S], added[Op.T]
    most = [max(takes, default=0) if trains else 0 for takes in gradients.takes]
    ranks = zip(shards.takes, shards.gives, most, strict=True)
    return [[max(take, take - give + more) for take, give in zip(takes, gives, strict=True)] for takes, gives, more in ranks]


def shard_room(added: Mapping[Op, OperationRows], trains: bool) -> tuple[int, ...]:
    """Bytes of each rank set aside for chunks between the shards' `S` and `T`: `MOST_OPEN_CHUNKS` of the largest."""
    rows = added[Op.S]
    each = zip(shard_peaks(added, trains), rows.takes, rows.gives, strict=True)
    return tuple(
        max(peaks, default=0) + (min(MOST_OPEN_CHUNKS, len(peaks)) - 1) * max(map(sub, takes, gives), default=0)
        for peaks, takes, gives in each
    )
