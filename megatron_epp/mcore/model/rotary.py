"""Rotary angles by position: a slice starts where its sequence has got to, a packed sequence at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.model.core_attention import ChunkParams


class PositionedRotary(torch.nn.Module):
    """Stands before a model's rotary embedding and asks it for the angles of a chunk's own positions.

    Megatron asks twice: `get_rotary_seq_len` is given the packed-sequence parameters and what it returns is passed to the call.

    Args:
        rotary: the model's own.
        shard: number of this context-parallel rank.
        num_shards: context-parallel ranks, which share the tokens of a chunk.
    """

    def __init__(self, rotary: torch.nn.Module, shard: int = 0, num_shards: int = 1) -> None:
        super().__init__()
        self.rotary = rotary
        self.shard, self.num_shards = shard, num_shards

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        params = next((a for a in (*args, *kwargs.values()) if isinstance(a, ChunkParams)), None)
        return self.rotary.get_rotary_seq_len(*args, **kwargs) if params is None else params

    def forward(self, length: Any, *args: Any, **kwargs: Any) -> Any:
        """Angles ``[tokens / shards, 1, 1, channels]`` of a chunk (with whatever the wrapped module returns beside them)."""
        if not isinstance(length, ChunkParams):
            return self.rotary(length, *args, **kwargs)
        pieces = length.context.table.part(self.shard, self.num_shards)
        parts = [self._angles(piece.start, piece.num_tokens) for piece in pieces]
        if isinstance(parts[0], tuple):  # YaRN returns a scale too
            return torch.cat([p[0] for p in parts]), *parts[0][1:]
        return torch.cat(parts)

    def _angles(self, start: int, length: int) -> Tensor | tuple[Tensor, ...]:
        make = getattr(self.rotary, "get_emb", None)  # the part of `forward` that keeps no cache of results
        return make(length, start) if make is not None else self.rotary(length, start)
