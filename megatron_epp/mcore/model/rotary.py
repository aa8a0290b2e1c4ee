"""Rotary angles by position: a slice starts at its offset in the sequence, a packed sequence at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel


class PositionedRotary(torch.nn.Module):
    """Wrapper of a model's rotary embedding that returns the angles of a chunk's own positions.

    Megatron calls it in two steps: `get_rotary_seq_len` gets the packed-sequence parameters, and `forward` gets its result.

    Args:
        rotary: the model's own rotary embedding.
        context_parallel: how ranks share the tokens of a chunk.
    """

    def __init__(self, rotary: torch.nn.Module, context_parallel: ContextParallel = NOT_SHARED) -> None:
        super().__init__()
        self.rotary, self.context_parallel = rotary, context_parallel

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        params = next((a for a in (*args, *kwargs.values()) if isinstance(a, ChunkParams)), None)
        return self.rotary.get_rotary_seq_len(*args, **kwargs) if params is None else params

    def forward(self, length: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the angles of a chunk, ``[tokens / shards, 1, 1, channels]``, and any further result of the wrapped module."""
        if not isinstance(length, ChunkParams):
            return self.rotary(length, *args, **kwargs)
        table = length.context.table
        pieces = table.part(self.context_parallel.shard(table.num_tokens))
        parts = [self._angles(piece.start, piece.num_tokens) for piece in pieces]
        if isinstance(parts[0], tuple):  # YaRN returns a scale too
            return torch.cat([p[0] for p in parts]), *parts[0][1:]
        return torch.cat(parts)

    def _angles(self, start: int, length: int) -> Tensor | tuple[Tensor, ...]:
        make = getattr(self.rotary, "get_emb", None)  # the part of `forward` that keeps no cache of results
        return make(length, start) if make is not None else self.rotary(length, start)
