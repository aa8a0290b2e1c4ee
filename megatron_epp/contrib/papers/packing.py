"""Packing of whole short sequences into chunks of their own and chunks with tail slices (InfiniPipe, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


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


def pack(tails: Sequence[PackedItem], shorts: Sequence[PackedItem], time_limit_us: float, token_limit: int) -> list[Bucket]:
    """Put every short sequence into a bucket: a tail slice's, or a new one.

    Longest first, each goes to the bucket with the smallest time per token that has room under both limits. The paper opens a
    fresh bucket only when no bucket has token room and otherwise loosens the time limit; that piles sequences up where they
    are heavy in attention. Here as many fresh buckets are opened as the time limit calls for in all, and only after that is it
    loosened, to the least that lets the sequence in. The token limit is never exceeded.

    Args:
        shorts: the short sequences, each within `token_limit`.
        token_limit: kept for every bucket.

    Returns:
        The buckets of the tails in their order, then the fresh ones.
    """
    buckets = [Bucket(tail.time_us, tail.tokens) for tail in tails]
    if not shorts:
        return buckets
    room_us = sum(max(0.0, time_limit_us - tail.time_us) for tail in tails)
    fresh_left = math.ceil((sum(item.time_us for item in shorts) - room_us) / time_limit_us - 0.05) if time_limit_us > 0 else 0
    time_us, tokens = np.full(len(tails) + len(shorts), np.inf), np.full(len(tails) + len(shorts), token_limit + 1)
    time_us[: len(tails)], tokens[: len(tails)] = [tail.time_us for tail in tails], [tail.tokens for tail in tails]
    for item in sorted(shorts, key=lambda item: (-item.time_us, -item.tokens, item.sequences)):
        fitting = np.flatnonzero(tokens[: len(buckets)] <= token_limit - item.tokens)
        if len(fitting) and fresh_left <= 0:
            time_limit_us = max(time_limit_us, float(time_us[fitting].min()) + item.time_us)
        fitting = fitting[time_us[fitting] <= time_limit_us - item.time_us]
        if len(fitting):
            at = int(fitting[(time_us[fitting] / tokens[fitting]).argmin()])
        else:
            fresh_left, at = fresh_left - 1, len(buckets)
            buckets.append(Bucket())
        buckets[at].add(item)
        time_us[at], tokens[at] = buckets[at].time_us, buckets[at].tokens
    return buckets
