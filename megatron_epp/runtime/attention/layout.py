"""Layout of a KV cache: which tensors a layer caches of a token, and how keys and values are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

type Tensors = tuple[Tensor, ...]
"""Cached tensors of some tokens, or their gradients: ``[tokens, heads, width]`` each.

The number of heads is the same in all of them, widths need not be. Where all query heads share what is cached (a latent), it is
one head, which cannot be split into groups.
"""


class Piece(NamedTuple):
    """Group of heads of one layer, which attention processes at once."""

    layer: int
    part: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of what attention caches of a token in one layer.

    The relay and KV offload hold, copy and add up cached tensors, however many there are and however wide; only core attention
    turns them into keys and values. Both functions must be linear in every tensor and treat every head in the same way,
    because attention may run by groups of heads.

    Attributes:
        keys_and_values: function from cached tensors to keys ``[tokens, heads, channels]`` and values
            ``[tokens, heads, value_channels]``.
        gradients: function from the gradients of keys and of values to those of the cached tensors.
    """

    keys_and_values: Callable[[Tensors], tuple[Tensor, Tensor]]
    gradients: Callable[[Tensor, Tensor], Tensors]


KEYS_AND_VALUES = KVLayout(lambda cached: (cached[0], cached[1]), lambda dk, dv: (dk, dv))
"""Multi-head and grouped-query attention: keys and values are cached as they are."""
