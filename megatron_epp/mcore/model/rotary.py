"""Rotary embeddings of a model in plans: the angles of a chunk's own positions on this context-parallel rank.

Megatron calls an embedding in two steps: `get_rotary_seq_len` gets packed-sequence parameters, `forward` gets its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor

from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.language_model import axes_of
from megatron_epp.mcore.model.replaced import AFTER, assigned, put
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.plan import EppError
from megatron_epp.runtime.attention import context_parallel
from megatron_epp.runtime.attention.context_parallel import ContextParallel

TABLE_TOKENS = 1 << 14
"""Positions whose angles are kept, 8 MiB for 128 channels; slices of longer sequences compute theirs. Not measured."""
_FEW_TOKENS = 64
"""Positions by which tables are compared: angles of Megatron's embeddings are proportional to the position."""


def adopt(model: Any) -> None:
    """Have the model, and each latent attention, turn by the positions of a chunk's tokens, if they do not yet.

    All latent attentions share a table. Raises `EppError` for a program's own whose angles depend on more than the position.
    """
    # Angles by several axes are of the positions that the model gets.
    own = getattr(model, "rotary_pos_emb", None) if axes_of(model) == 1 else None
    latents = (module.rotary_pos_emb for module in model.modules() if isinstance(module, MultiLatentAttention))
    longest, tables = int(getattr(model, "max_sequence_length", 0) or TABLE_TOKENS), list[_Angles]()
    for rotary, by_row in [*([] if own is None else [(own, True)]), *((rotary, False) for rotary in latents)]:
        group = context_parallel.of_group(mpu.get_context_parallel_group())
        if "get_rotary_seq_len" in vars(rotary) and not assigned(rotary, ("get_rotary_seq_len",)):
            continue
        angles = _Angles(rotary)
        angles.check(longest)
        angles = next(filter(angles.equals, tables), angles)
        tables.append(angles)
        put(rotary, "get_rotary_seq_len", functools.partial(_chunk_or_length, rotary.get_rotary_seq_len), (AFTER,))
        put(rotary, "forward", functools.partial(_turns, rotary.forward, angles, group, by_row), (AFTER,))


def _chunk_or_length(original: Callable[..., int], *args: Any, **kwargs: Any) -> Any:
    """Return the chunk's parameters in place of a length, for `forward`; without a chunk the length."""
    params = next((a for a in (*args, *kwargs.values()) if isinstance(a, ChunkParams)), None)
    return original(*args, **kwargs) if params is None else params


def _turns(
    original: Callable[..., Any],
    angles: _Angles,
    context_parallel: ContextParallel,
    by_row: bool,
    length: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the angles of a chunk, ``[tokens / shards, 1, 1, channels]``, and any further result of the embedding.

    Latent attention's queries and angles have no dimension for rows of a batch: `by_row` is False.
    """
    if not isinstance(length, ChunkParams):
        return original(length, *args, **kwargs)
    table, shared = length.context.table, length.context.context_parallel or context_parallel
    pieces = table.part(shared.shard(table.num_tokens))
    parts, more = zip(*(angles.of(piece.start, piece.num_tokens) for piece in pieces), strict=True)
    whole = torch.cat(parts) if by_row else torch.cat(parts)[:, 0]
    return (whole, *more[0]) if more[0] else whole  # YaRN returns a scale too


class _Angles:
    """Angles of an embedding by position, and what else it returns: Megatron's `get_emb`, which keeps no cache of results, or
    the `forward` of a class or a function of a program's own, which says nothing of single positions.
    """

    def __init__(self, rotary: Any) -> None:
        self._name = type(rotary).__name__
        self._is_own = not is_installed(type(rotary)) or bool(assigned(rotary, ("forward",)))
        make = None if self._is_own else getattr(rotary, "get_emb", None)
        self._make: Callable[..., Any] = make or functools.partial(rotary.forward, packed_seq=True)  # for all ranks
        self._has_offset = make is not None
        self._learns = any(parameter.requires_grad for parameter in rotary.parameters())
        self._table: tuple[Tensor, tuple[Any, ...]] | None = None

    def of(self, start: int, length: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the angles of some positions, from a table if it reaches that far: no kernel is launched for them then."""
        end = start + length
        if end > TABLE_TOKENS and self._has_offset:
            return self._made(length, start)
        if self._table is None or len(self._table[0]) < end:
            self._table = self._made(max(TABLE_TOKENS, 1 << (end - 1).bit_length()))
        angles, more = self._table
        return angles.narrow(0, start, length), more

    def _made(self, length: int, start: int = 0) -> tuple[Tensor, tuple[Any, ...]]:
        angles = self._make(length, start) if start else self._make(length)
        return (angles[0], angles[1:]) if isinstance(angles, tuple) else (angles, ())

    def equals(self, other: _Angles) -> bool:
        """True for two of Megatron's with the same angles."""
        if self._is_own or other._is_own:
            return False
        (angles, more), (others, rest) = self._made(_FEW_TOKENS), other._made(_FEW_TOKENS)
        return torch.equal(angles, others) and more == rest

    def check(self, longest: int) -> None:
        """Raise `EppError` if angles are learnt, or differ between sequences of different lengths, which slices do not know."""
        if self._learns:
            raise EppError(f"the rotary embedding {self._name} has parameters that train, which slices do not: freeze them")
        if not self._is_own:
            return
        (angles, _), lengths = self._made(longest), {min(_FEW_TOKENS, longest), longest - longest // 2}
        if differing := [length for length in lengths if not torch.equal(self._made(length)[0], angles[:length])]:
            raise EppError(
                f"the rotary embedding {self._name} gives positions other angles in a sequence of {longest} tokens than in one "
                f"of {differing[0]}, and slices of sequences do not know their lengths: give it one scale for all lengths"
            )
