"""Test chunks on a rank's own stage, and their forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_epp.data.batch import AheadArrays
from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext

_VOCABULARY = 32
"""Number of token ids that every model's vocabulary contains."""


def _inputs(stage: MegatronStage, tokens: int) -> ChunkInputs:
    """Return varied tokens, so that a router spreads them, all at position 0, since a model may have few positions."""
    device, own = stage.message(1)[2], tokens // stage.config.context_parallel_size
    ids = torch.arange(own, device=device)[None] % _VOCABULARY
    positions, ones = torch.zeros_like(ids), torch.ones(1, own, device=device)
    positions = positions if stage.axes == 1 else positions.expand(stage.axes, 1, own)
    if not stage.depths:
        return ChunkInputs(ids, positions, ids.clone(), ones)
    ahead = AheadArrays(*(column.expand(stage.depths, *column.shape) for column in (ids, positions, ids, ones / own, ones)))
    return ChunkInputs(ids, positions, ids.clone(), ones, ahead=ahead)


def enter(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[ChunkContext, Tensor | None]:
    """Return the context of a chunk and its hidden states, which a run has on the device before its forward."""
    tokens = chunk.num_tokens
    ready = [_inputs(stage, tokens)]
    stage.begin(lambda _: ready.pop())  # given away, so that autograd alone holds what is saved of them
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else ReceiveLeaf().enter(torch.randn(shape, dtype=dtype, device=device))
    return ChunkContext(0, SegmentTable.build(chunk, tokens), stage.kv_cache, view, recompute), hidden


def forward(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[Tensor | None, Tensor, ChunkContext]:
    context, hidden = enter(stage, chunk, view, recompute)
    return hidden, stage.forward(context, hidden), context


def backward(stage: MegatronStage, output: Tensor, context: ChunkContext, keep_weights: bool = False) -> None:
    if stage.weights is not None:
        stage.weights.kept = (context.chunk,) if keep_weights else ()
    stage.backward(context, output, None if stage.has_loss else torch.ones_like(output))


@contextmanager
def watched(modules: Iterable[torch.nn.Module], note: Callable[[str], None]) -> Iterator[None]:
    """Watch the modules that run hidden states forward in the body, and the backwards of these.

    `note` is called with ``in`` and ``out`` when a forward begins and ends, and with ``gradient in`` and ``gradient out`` when
    the gradients of its output and of its input have been computed.
    """

    def entered(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note("in")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        hidden = hidden if isinstance(hidden, Tensor) else getattr(module, "input_tensor", None)
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: note("gradient out"))

    def left(_: torch.nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        note("out")
        (output if isinstance(output, Tensor) else output[0]).register_hook(lambda _: note("gradient in"))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(left).remove)
        yield


def layers_of(stage: MegatronStage) -> torch.nn.ModuleList:
    layers: Any = stage.decoder.layers
    return layers


def run_weights(stage: MegatronStage) -> Iterator[None]:
    """Compute the deferred weight gradients of a chunk, and yield after those outside of the layers and after the others."""
    assert stage.weights is not None  # they were kept
    inside = {id(weight) for weight in layers_of(stage).parameters()}
    deferred = stage.weights.pop(0)
    for of_layers in (False, True):
        for gradient in deferred:
            if (id(gradient.weight) in inside) is of_layers:
                gradient.run()
        yield
