"""Costs of context parallelism: the heads that a rank attends with, and what sharing a chunk's tokens adds to a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadExchangeCosts:
    """Costs of exchanging tokens for heads around attention; how it runs is in `runtime.attention.context_parallel`.

    Ranks attend with whole heads: heads of keys and values are replicated if there are too few. Attention's output is kept
    twice, by heads and by tokens. Widths are numbers of values per token of all heads of a layer, before they are divided over
    ranks. Another scheme is another class with these methods.

    Attributes:
        ranks: number of ranks that share the tokens; 1 for no context parallelism, which costs nothing.
    """

    ranks: int

    def kv_copies(self, kv_heads: int) -> int:
        """Return the number of ranks that cache the same keys and values, of `kv_heads` heads on a tensor-parallel rank."""
        return math.lcm(kv_heads, self.ranks) // kv_heads

    def kv_heads_on_rank(self, kv_heads: int) -> int:
        """Return the number of heads of keys and values that a rank attends with."""
        return kv_heads * self.kv_copies(kv_heads) // self.ranks

    def kept_width(self, query_width: int, cached_width: int, copies: int) -> int:
        """Return the width of what a layer keeps until its backward in addition to queries, cached tensors and output."""
        return cached_width * (copies - 1) + (query_width if self.ranks > 1 else 0)

    def exchanged_width(self, query_width: int, cached_width: int, copies: int) -> int:
        """Return the width of what a layer's forward exchanges, and its backward again, parts that stay on a rank included."""
        return 2 * query_width + cached_width * copies

    @property
    def sent_share(self) -> float:
        """Share of the exchanged values that leave their rank."""
        return 1 - 1 / self.ranks
