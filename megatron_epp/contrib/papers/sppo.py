"""SPPO (arXiv 2503.10377, sections 3 to 6): 1F1B over slices of a sequence, each with an offload share of its own.

Kept: slices of equal time, keys and values that stay on the device, and of every other activation the share that the link
moves while a slice is computed, ``min(1, M / A)`` for ``A`` bytes of a slice and ``M`` bytes moved in that time; copies come
back one after the other, last slice first. With `Options.offload` shares are copied whether or not a cap requires it. Since
later slices are shorter, their shares are larger; the paper prints falling shares, against its own condition that ``share * A``
is the same for all. A slice whose backward follows too soon stays, such as the last one on the last rank.

Left out: multiplexed partitioning, in which idle ranks take a part of another stage's slices. They would need that stage's
weights, and the paper does not say how they get them. The number of slices is the fastest plan's, instead of the least of
the paper's ``(p - 1 + N) / N`` times a measured time of N slices.
"""

from __future__ import annotations

from megatron_epp.features.copies.ahead import Shares
from megatron_epp.planner.tables import Tables


def sequence_aware_shares(tables: Tables) -> Shares:
    """Return the share of every chunk that the link moves while the chunk's forward takes place."""
    return [
        [
            min(1.0, forward_us / max(forward_us, tables.host_us(tables.kept_bytes(stage, c, 0))))
            for c, forward_us in enumerate(passes.forward_us.tolist())
        ]
        for stage, passes in enumerate(tables.passes)
    ]
