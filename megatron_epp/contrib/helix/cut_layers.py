"""Layers cut inside attention: a model chunk has the beginning of a layer, and the end of the layer before it.

A chunk is built with one whole layer. Up to its queries, keys and values it is the layer of that number; from the output
projection on it has the weights of the layer before, which on the first chunk is the model's last. So each stage is one chunk,
but for the last, which is on the first chunk with the head. Checkpoints have the weights under their own layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.model.replaced import put
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan.attributes import having
from megatron_epp.plan.errors import EppError
from megatron_epp.runtime.context import ChunkContext

_ENDS = ("self_attention.linear_proj.", "pre_mlp_layernorm.", "mlp.")
"""Modules of the end of a layer."""
_OF_ATTENTION = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
"""Arguments of a layer that its attention takes."""


@dataclass(slots=True)
class Cut:
    """A chunk on a stage, from its forward to its backward."""

    output: Tensor | None  # of the attention ahead of the stage, ``[tokens, 1, width]``; None on the first stage
    begins: bool = True  # the stage ends with queries, keys and values, ``[tokens, 1, widths]``
    inputs: Tensor | None = None  # these, of its last forward
    gradient: Tensor | None = None  # of these, ahead of its backward


class CutLayer:
    """A layer which runs whole, but while there is a `cut`: then its end comes first, then its beginning."""

    def __init__(self, layer: Any) -> None:
        self.cut: Cut | None = None
        self._layer, self._collects, core = layer, False, layer.self_attention.core_attention
        self._run, self._attend, self._project = layer.forward, core.attend, layer.self_attention.linear_proj.forward
        put(layer, "forward", self._forward)
        put(layer.self_attention.linear_proj, "forward", self._projection)
        core.attend = self._attention
        layer.sharded_state_dict = partial(_under_own_layers, layer.sharded_state_dict)

    def _forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        layer, cut = self._layer, self.cut
        if cut is None:
            return self._run(hidden_states, *args, **named)
        if cut.output is not None:
            with layer.bias_dropout_add_exec_handler():
                add = layer.self_attn_bda(layer.training, layer.config.bias_dropout_fusion)
                hidden_states = add(layer.self_attention.linear_proj(cut.output), hidden_states, layer.hidden_dropout)
            hidden_states = layer._forward_mlp(hidden_states)
        if cut.begins:
            of_attention = {name: named[name] for name in _OF_ATTENTION if name in named}
            with having(self, _collects=True):
                inputs, _ = layer.self_attention(layer.input_layernorm(hidden_states), **of_attention)
            cut.inputs = inputs.detach()
            hidden_states = _Beginning.apply(hidden_states, inputs, cut)  # type: ignore[no-untyped-call]
        return hidden_states, None

    def _attention(self, query: Tensor, cached: tuple[Tensor, ...], *options: Any, **more: Any) -> Any:
        if not self._collects:
            return self._attend(query, cached, *options, **more)
        return torch.cat([part.flatten(1) for part in (query, *cached)], dim=1)

    def _projection(self, output: Tensor) -> Any:
        return (output, None) if self._collects else self._project(output)


class _Beginning(torch.autograd.Function):
    """Hidden states, whose backward is that of a layer's queries, keys and values too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, inputs: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, ctx.cut.gradient, None


def _under_own_layers(original: Callable[..., Any], prefix: str = "", offsets: Any = (), *rest: Any, **named: Any) -> Any:
    """Return a layer's sharded state dict, in which the parts of its end belong to the layer before."""
    offsets = named.pop("sharded_offsets", offsets)
    before = tuple((axis, (number - 1) % count, count) for axis, number, count in offsets)
    own, of_end = (original(prefix, each, *rest, **named) for each in (offsets, before))
    return {name: (of_end if name.startswith(_ENDS, len(prefix)) else own)[name] for name in own}


def cut_layer(model: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    """Cut the layer of a model chunk. Raises `EppError` for a chunk with another number of layers."""
    layer, *more = model.decoder.layers
    if more:
        raise EppError(f"a stage with separate attention has one layer, and chunk {vp_stage or 0} has {1 + len(more)}")
    layer.cut_layer = CutLayer(layer)
    layer.number_of = lambda name: (layer.layer_number - 1 - name.startswith(_ENDS)) % layer.config.num_layers


def end_where_cut(stage: MegatronStage) -> None:
    """Run the first chunk without its head on the first stage, and without its embedding on the last."""
    run, model, block = stage.forward, stage.language_model, stage.decoder

    def forward(context: ChunkContext, hidden: Tensor | None) -> Tensor:
        is_first = stage.is_first
        end = having(model, post_process=False) if is_first else having(stage, _rows=lambda _: nullcontext(hidden))
        with end, having(block, final_layernorm=None if is_first else block.final_layernorm):
            return run(context, hidden)

    stage.forward = forward  # type: ignore[method-assign]
