"""Costs of one pipeline stage: time linear in tokens and attention pairs, memory in bytes per token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.line import NO_TIME, Level, Line, TimeColumn
from megatron_epp.cost.memory import NO_STATIC, Static
from megatron_epp.cost.text import Form
from megatron_epp.cost.work import ChunkWork
from megatron_epp.plan.kv_sums import MOST_ROUNDED

_FORM = Form("cost profile", "megatron-epp/costs", 1)
_IN_OLDER_FILES = "message_bytes_per_token"
"""Field of a stage in older files; now `PipelineCosts.message_bytes_per_token`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Time and memory of one pipeline stage.

    Attributes:
        num_layers: transformer layers of the stage.
        forward: one layer's forward; recomputing a layer whole costs the same.
        backward: one layer's backward, weight gradient included, recompute not.
        weight: one layer's weight gradient, a part of `backward`: if W is a separate action, B takes the rest.
        extra_forward: the stage's work besides its layers: embedding, or final norm, logits and loss.
        extra_backward: the same, backward.
        extra_weight: the same, weight gradient, a part of `extra_backward`.
        layer_bytes_per_token: kept from forward to backward by a layer that does not recompute, its K and V included.
        full_bytes_per_token: peak of such a layer, or of one that recomputes whole, while its backward runs; None if it is
            `layer_bytes_per_token`.
        attended_bytes_per_token: held when the backward of its attention has made the gradient of K and V; None if unknown,
            then all bytes of the layer are assumed.
        recomputed_layer_bytes_per_token: kept by a layer that recomputes whole: its input.
        linear: a layer that recomputes all but core attention; None if unknown.
        mlp: a layer that recomputes its MLP and norms; None if unknown.
        extra_bytes_per_token: kept by the stage independent of its layers: embedding output or received input, logits, loss.
        head_bytes_per_token: the part of these that backward frees before it reaches the layers: logits, loss.
        kv_bytes_per_token: K and V of one layer.
        kv_gradient_bytes_per_token: their gradient while it is accumulated; None if it takes as much as K and V.
        many_kv_gradient_bytes_per_token: the same for sequences with more slices than `kv_sums.MOST_ROUNDED`; None if it is
            the same size.
        kv_heads: heads of keys and values that a rank has inside attention.
        queries_per_key: query heads that share one of them.
        weight_bytes_per_token: needed by a layer's W after its B: inputs and output gradients of the linear layers.
        apart_bytes_per_token: peak of a layer during a backward with split weight gradient, which keeps them; None if unknown.
        apart_attended_bytes_per_token: `attended_bytes_per_token` of such a backward; None if unknown.
        extra_weight_bytes_per_token: `weight_bytes_per_token` of the stage's extras.
        static: weights, gradients, optimizer state.
        workspace_bytes: held only while a pass runs, independent of its tokens: a block's logits.
        working_bytes_per_token: held only while a pass runs, for its current layer: gradients, workspace of its kernels.
    """

    num_layers: int
    forward: Line
    backward: Line
    weight: Line = NO_TIME
    extra_forward: Line = NO_TIME
    extra_backward: Line = NO_TIME
    extra_weight: Line = NO_TIME
    layer_bytes_per_token: float
    full_bytes_per_token: float | None = None
    attended_bytes_per_token: float | None = None
    recomputed_layer_bytes_per_token: float
    linear: Level | None = None
    mlp: Level | None = None
    extra_bytes_per_token: float = 0.0
    head_bytes_per_token: float = 0.0
    kv_bytes_per_token: float
    kv_gradient_bytes_per_token: float | None = None
    many_kv_gradient_bytes_per_token: float | None = None
    kv_heads: int = 1
    queries_per_key: int = 1
    weight_bytes_per_token: float = 0.0
    apart_bytes_per_token: float | None = None
    apart_attended_bytes_per_token: float | None = None
    extra_weight_bytes_per_token: float = 0.0
    static: Static = NO_STATIC
    workspace_bytes: int = 0
    working_bytes_per_token: float = 0.0

    @property
    def static_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.static.num_bytes

    def level(self, name: str) -> Level | None:
        """Costs of a recompute mode by its name in `Recompute`; None if unknown."""
        if name == "whole":
            return Level(self.forward, self.recomputed_layer_bytes_per_token)
        return self.linear if name == "linear" else self.mlp

    def kv_gradient_per_token(self, work: ChunkWork) -> TimeColumn:
        """Bytes per token of the gradient of one layer's keys and values while it is accumulated, for each chunk's sequence."""
        few = self.kv_bytes_per_token if self.kv_gradient_bytes_per_token is None else self.kv_gradient_bytes_per_token
        many = few if self.many_kv_gradient_bytes_per_token is None else self.many_kv_gradient_bytes_per_token
        return np.where(work.num_slices > MOST_ROUNDED, many, few)

    def peaks_per_token(self, level: str, apart: bool) -> tuple[float, float]:
        """Bytes per token of one layer when its backward begins, and when its attention has made the gradient of K and V."""
        if apart:
            everything = self.layer_bytes_per_token + self.weight_bytes_per_token
            sizes = self.apart_bytes_per_token, self.apart_attended_bytes_per_token
        else:
            own = self.level(level) if level else None
            everything = self.layer_bytes_per_token if self.full_bytes_per_token is None else self.full_bytes_per_token
            sizes = None if own is None else own.full_bytes_per_token, self.attended_bytes_per_token
        full, attended = (everything if size is None else size for size in sizes)
        return full, attended

    @property
    def stage_forward(self) -> Line:
        """Time of the stage's whole forward."""
        return self.forward.scaled(self.num_layers) + self.extra_forward

    @property
    def stage_backward(self) -> Line:
        """Time of the stage's whole backward, without recompute."""
        return self.backward.scaled(self.num_layers) + self.extra_backward

    @property
    def stage_weight(self) -> Line:
        """Time of all weight gradients of the stage, a part of `stage_backward`."""
        return self.weight.scaled(self.num_layers) + self.extra_weight
