"""Modules of Megatron's that mix tokens without core attention: they run a chunk by a function of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.replaced import put

if TYPE_CHECKING:
    from megatron_epp.runtime.context import ChunkContext


def run_chunks(model: Any, is_of: Callable[[Any], bool], forward: Callable[[Any, int, Any, ChunkContext], Any]) -> None:
    """Have modules of a kind run by `forward` where they get a chunk, and by their own forward otherwise.

    `forward` takes a module, a number that is unique among modules and depths of multi-token prediction, hidden states
    ``[tokens, 1, hidden]`` and the chunk's context, and returns what the module's own does.
    """
    modules = [*model.modules()]
    repeated = {part for block in modules if getattr(block, "mtp_use_repeated_layer", False) for part in block.modules()}
    for number, module in enumerate(modules):
        if is_of(module):
            stride = len(modules) * (module in repeated)
            put(module, "forward", functools.partial(_of_chunk, module, number, stride, forward, module.forward), wraps=False)


def _of_chunk(
    module: Any,
    number: int,
    stride: int,
    forward: Callable[[Any, int, Any, ChunkContext], Any],
    original: Callable[..., Any],
    hidden_states: Any,
    *rest: Any,
    packed_seq_params: Any = None,
    **named: Any,
) -> Any:
    if isinstance(packed_seq_params, ChunkParams):
        number += stride and stride * (packed_seq_params.ahead.depth - 1)
        return forward(module, number, hidden_states, packed_seq_params.context)
    return original(hidden_states, *rest, packed_seq_params=packed_seq_params, **named)
