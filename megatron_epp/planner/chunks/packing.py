"""Packing of whole short sequences into chunks of their own and chunks with tail slices (InfiniPipe, Algorithm 1)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class PackedItem(NamedTuple):
    """Whole sequences that stay together, or a tail slice, with their time and tokens, without a chunk's fixed part."""

    time_us: float
    tokens: int
    sequences: tuple[int, ...]


@dataclass(slots=True)
class Bucket:
    """A chunk in the making: perhaps a tail slice, and whole sequences."""

    time_us: float = 0.0
    tokens: int = 0
    sequences: list[int] = field(default_factory=list)

    def add(self, item: PackedItem) -> None:
        self.time_us += item.time_us
        self.tokens += item.tokens
        self.sequences += item.sequences

    @property
    def ratio(self) -> float:
        return self.time_us / self.tokens


def pack(tails: Sequence[PackedItem], shorts: Sequence[PackedItem], time_limit_us: float, token_limit: int) -> list[Bucket]:
    """Put every short sequence into a bucket: a tail slice's, or a new one.

    Longest first, each goes to the bucket with the smallest time per token that has room under both limits. The paper opens a
    fresh bucket only when no bucket has token room and otherwise loosens the time limit; that piles sequences up where they
    are heavy in attention. Here as many fresh buckets are opened as the time limit calls for in all, and only after that is it
    loosened, to the least that lets the sequence in. The token limit is never exceeded.

    Args:
        tails: the tail slices.
        shorts: the short sequences, each within `token_limit`.
        time_limit_us: aimed at for a bucket.
        token_limit: kept for every bucket.

    Returns:
        The buckets of the tails in their order, then the fresh ones.
    """
    buckets = [Bucket(tail.time_us, tail.tokens) for tail in tails]
    if not shorts:
        return buckets
    room_us = sum(max(0.0, time_limit_us - tail.time_us) for tail in tails)
    fresh_left = math.ceil((sum(item.time_us for item in shorts) - room_us) / time_limit_us - 0.05) if time_limit_us > 0 else 0
    queue = sorted(shorts, key=lambda item: (-item.time_us, -item.tokens, item.sequences))
    shelf = _Shelf(buckets, queue[-1].time_us, min(item.tokens for item in queue), token_limit)
    for item in queue:
        found = shelf.find(item, time_limit_us)
        if found is None and fresh_left <= 0 and (loosened := shelf.least_time_us(item)) is not None:
            time_limit_us = loosened + item.time_us
            found = shelf.find(item, time_limit_us)
        if found is None:
            fresh_left -= 1
            buckets.append(Bucket())
            found = len(buckets) - 1
        shelf.put(found, item, time_limit_us)
    return buckets


class _Shelf:
    """Buckets sorted by time per token; buckets too full for the smallest item are set aside."""

    def __init__(self, buckets: list[Bucket], least_item_us: float, least_item_tokens: int, token_limit: int) -> None:
        self.buckets = buckets
        self.least_item_us = least_item_us
        self.most_tokens = token_limit - least_item_tokens
        self.token_limit = token_limit
        self.open = sorted((bucket.ratio, number) for number, bucket in enumerate(buckets) if bucket.tokens <= self.most_tokens)
        self.parked: list[int] = []

    def find(self, item: PackedItem, time_limit_us: float) -> int | None:
        most_us, most_tokens = time_limit_us - item.time_us, self.token_limit - item.tokens
        for _, number in self.open:
            bucket = self.buckets[number]
            if bucket.time_us <= most_us and bucket.tokens <= most_tokens:
                return number
        return None

    def least_time_us(self, item: PackedItem) -> float | None:
        """Return the least time of a bucket with token room for the item, after reopening all parked ones; None if none has."""
        for number in self.parked:
            insort(self.open, (self.buckets[number].ratio, number))
        self.parked.clear()
        buckets = (self.buckets[number] for _, number in self.open)
        return min((bucket.time_us for bucket in buckets if bucket.tokens + item.tokens <= self.token_limit), default=None)

    def put(self, number: int, item: PackedItem, time_limit_us: float) -> None:
        """Add an item to a bucket.

        Args:
            time_limit_us: work above which a bucket counts as full.
        """
        bucket = self.buckets[number]
        if bucket.tokens:
            key = (bucket.ratio, number)
            at = bisect_left(self.open, key)
            if at < len(self.open) and self.open[at] == key:
                del self.open[at]
        bucket.add(item)
        if bucket.tokens > self.most_tokens:
            return
        if bucket.time_us + self.least_item_us > time_limit_us:
            self.parked.append(number)
        else:
            insort(self.open, (bucket.ratio, number))
