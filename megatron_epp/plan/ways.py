"""Directions in which messages travel between pipeline ranks, and the number of their communicators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Way(NamedTuple):
    """Direction of messages between two pipeline ranks, on the communicator for activations or for gradients."""

    sender: int
    receiver: int
    gradient: bool


def ways(*placements: Sequence[int]) -> list[Way]:
    """Return all directions in which messages between stages are sent, in the order in which ranks exchange their first ones.

    In this order they cannot deadlock: of all pairs that still wait, both ranks of the first one have reached it. Neighbours
    whose lower rank is even come first, then pairs whose lower rank is odd. So pairs meet side by side, and many ranks take no
    longer than few.

    Args:
        placements: each the rank of every stage.
    """
    hops = {(rank, after) for placement in placements for rank, after in pairwise(placement) if rank != after}
    return sorted({Way(*hop, False) for hop in hops} | {Way(*hop[::-1], True) for hop in hops}, key=_turn)


def _turn(way: Way) -> tuple[bool, int, int, int, bool, bool]:
    low, high = sorted(way[:2])
    is_against = (way.sender > way.receiver) != way.gradient  # an activation to a lower rank, or a gradient to a higher one
    return high - low > 1, low % 2, low, high, is_against, way.gradient


def most_links(used: Iterable[Way]) -> int:
    """Return the largest number of communicators for messages on a rank: each pair of ranks has its own on each group.

    Args:
        used: directions in which messages are sent.
    """
    ends = Counter(rank for way in used for rank in (way.sender, way.receiver))
    return max(ends.values(), default=0)
