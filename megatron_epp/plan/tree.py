"""Tree of small groups, through which many ranks exchange objects without a connection between every two of them."""

from __future__ import annotations

from itertools import pairwise

LARGEST_MESH = 64
"""Most members of a group whose ranks are all connected to each other. A job of 512 ranks in one such group has 130,816
connections, each a socket at both ends."""

Level = tuple[tuple[int, ...], ...]
"""Groups of a level, each the positions of its members."""


def tree_of(num_ranks: int, largest: int = LARGEST_MESH) -> tuple[Level, ...]:
    """Divide ranks into groups, and the first ranks of these again, until there is one group.

    Every level has as few groups as possible, of nearly equal size: making a group keeps all ranks of a job waiting.

    Args:
        num_ranks: number of ranks, at least 1.
        largest: most members of a group, at least 2.

    Returns:
        levels, the lowest first; one level where all ranks fit into one group.
    """
    members, levels = tuple(range(num_ranks)), list[Level]()
    while not levels or len(levels[-1]) > 1:
        count = -(-len(members) // largest)
        cuts = [number * len(members) // count for number in range(count + 1)]
        levels.append(tuple(members[start:end] for start, end in pairwise(cuts)))
        members = tuple(group[0] for group in levels[-1])
    return tuple(levels)


def num_connections(num_ranks: int, position: int, largest: int = LARGEST_MESH) -> int:
    """Return the number of ranks to which the rank at `position` is connected in the tree."""
    return sum(len(group) - 1 for level in tree_of(num_ranks, largest) for group in level if position in group)
