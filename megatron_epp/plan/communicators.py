"""Communicators of pipeline ranks: the directions of messages, CTAs, and trees of small groups for objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

LARGEST_MESH = 64
"""Most members of a group whose ranks are all connected to each other. A job of 512 ranks in one such group has 130,816
connections, each a socket at both ends."""
_CTAS = 4
"""CTAs of a communicator, if SMs suffice: messages are overlapped with compute, which makes better use of the SMs."""
_LARGEST_SHARE = 4
"""Inverse of the largest share of a device's SMs that all communicators of a rank may hold together."""

Level = tuple[tuple[int, ...], ...]
"""Groups of a level of a tree, each the positions of its members."""


class Direction(NamedTuple):
    """Direction of messages between two pipeline ranks, on the communicator for activations or for gradients."""

    sender: int
    receiver: int
    gradient: bool


def directions(*placements: Sequence[int]) -> list[Direction]:
    """Return all directions in which messages between stages are sent, in the order in which ranks exchange their first ones.

    In this order they cannot deadlock: of all pairs that still wait, both ranks of the first one have reached it. Neighbours
    whose lower rank is even come first, then pairs whose lower rank is odd. So pairs meet side by side, and many ranks take no
    longer than few. Each of the placements gives the rank of every stage.
    """
    hops = {(rank, after) for placement in placements for rank, after in pairwise(placement) if rank != after}
    return sorted({Direction(*hop, False) for hop in hops} | {Direction(*hop[::-1], True) for hop in hops}, key=_connect_order)


def _connect_order(direction: Direction) -> tuple[bool, int, int, int, bool, bool]:
    low, high = sorted(direction[:2])
    # Against the order of stages: an activation to a lower rank, or a gradient to a higher one.
    is_against = (direction.sender > direction.receiver) != direction.gradient
    return high - low > 1, low % 2, low, high, is_against, direction.gradient


def most_links(used: Iterable[Direction]) -> int:
    """Return the largest number of communicators for messages on a rank: each pair of ranks has its own on each group."""
    return max(Counter(rank for direction in used for rank in (direction.sender, direction.receiver)).values(), default=0)


def link_ctas(num_links: int, num_sms: int) -> int:
    """Return the maximum number of CTAs of one communicator, a power of two, since NCCL rounds channels up to one; at least 1.

    All `num_links` communicators for messages of a rank may wait at the same time, on a device with `num_sms` SMs.
    """
    return 1 << max(1, min(_CTAS, num_sms // _LARGEST_SHARE // max(1, num_links))).bit_length() - 1


def tree_of(num_ranks: int, largest: int = LARGEST_MESH) -> tuple[Level, ...]:
    """Divide ranks into groups of at most `largest` (at least 2), and their first ranks again, until there is one group.

    Every level, the lowest first, has as few groups as possible, of nearly equal size: making one keeps all ranks waiting.
    """
    members, levels = tuple(range(num_ranks)), list[Level]()
    while not levels or len(levels[-1]) > 1:
        count = -(-len(members) // largest)
        cuts = [number * len(members) // count for number in range(count + 1)]
        levels.append(tuple(members[start:end] for start, end in pairwise(cuts)))
        members = tuple(group[0] for group in levels[-1])
    return tuple(levels)
