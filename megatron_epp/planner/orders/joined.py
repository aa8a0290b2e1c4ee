"""Steps of two actions: which of an order run together, and how long both take.

While one of the two exchanges activations between tensor-parallel ranks, the other computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron_epp.plan import Action
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.tables import Tables

Joined = frozenset[tuple[Action, Action]]
"""Pairs of actions of a rank that run in one step; an action is in one pair at most."""


class JoinedOrder(NamedTuple):
    """Order in which some neighbouring actions run in one step.

    Attributes:
        rows: the actions of every rank.
        joined: the pairs.
    """

    rows: Order
    joined: Joined


class Passing(NamedTuple):
    """Time of an action by itself, and the part of it that is exchange, in microseconds."""

    time_us: float
    exchange_us: float


def adjacent(order: Order, joined: Joined) -> Joined:
    """Return the pairs that still stand one after the other, after actions were added to an order or taken out of it."""
    return frozenset(pair for row in order for pair in pairwise(row) if pair in joined) if joined else joined


def joined_us(one: Passing, other: Passing) -> float:
    """Compute the time of two actions in one step, in microseconds.

    The exchange of each is overlapped with the compute of the other, as far as that lasts; two computations share the device,
    so their times add up. Recompute in a backward counts as compute, its own exchange included.
    """
    exchange_us, other_exchange_us = (min(each.exchange_us, each.time_us) for each in (one, other))
    compute_us, other_compute_us = one.time_us - exchange_us, other.time_us - other_exchange_us
    return max(exchange_us, other_compute_us) + max(other_exchange_us, compute_us)


def joined_bytes(row: Sequence[Action], joined: Joined, tables: Tables, takes: list[int], gives: list[int]) -> None:
    """Let both actions of a step allocate when the first starts and free when the second ends.

    A rank's static bytes have room for one pass; a step of two needs that of the smaller one too.

    Args:
        row: the actions of a rank.
        joined: the pairs.
        tables: sizes of the chunks.
        takes, gives: bytes that every action allocates when it starts and frees when it ends; changed in place.
    """
    for at, pair in enumerate(pairwise(row)):
        if pair in joined:
            more = min(tables.passing[stage][chunk] for _, stage, chunk in pair)
            takes[at], takes[at + 1] = takes[at] + takes[at + 1] + more, 0
            gives[at], gives[at + 1] = 0, gives[at] + gives[at + 1] + more
