"""Sharing of a link between devices and their host."""

from __future__ import annotations


def divide(sharing: int, apart: int) -> tuple[int, int]:
    """Number of ranks that use a node's shared link at once, and of pipeline ranks that take turns on it.

    Megatron numbers tensor-parallel ranks first, then context-parallel ones, then replicas, then stages, and ranks are devices
    in that order. So a stage's ranks and their replicas are adjacent, and the next stage's ranks follow all of them.

    Ranks that share a stage run the same plan, so they copy at the same times: each has its part of the link. Replicas run
    plans of their own, whose copies may come at any time: they are taken to copy at the same times too. Stages of one pipeline
    are planned together, so their copies take turns. Where the devices of a link are not whole stages, or only one stage's,
    no ranks take turns and every rank has its part.

    Args:
        sharing: devices in a row that share a link.
        apart: ranks from one stage's to the next stage's in the same pipeline: tensor x context parallel ranks x replicas.

    Returns:
        ranks that use a link at once, and the consecutive pipeline ranks that take turns on each one's part.
    """
    return (sharing, 1) if sharing % apart else (apart, sharing // apart)
