"""Costs of one pipeline stage: time linear in tokens and attention pairs, memory in bytes per token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_epp.cost.memory import NO_STATIC, Static
from megatron_epp.cost.serialize import check_part
from megatron_epp.cost.work import NO_TIME, ChunkWork, Line, ModeCosts, TimeColumn
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import printable, shown
from megatron_epp.plan.recompute import FULL, MODES
from megatron_epp.plan.sizing import MOST_ROUNDED_SLICES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """Costs that a stage takes over unchanged from a profile's layer.

    Attributes:
        forward: one layer's forward; recomputing a layer in full costs the same.
        backward: one layer's backward, weight gradient included, recompute not.
        weight: one layer's weight gradient, a part of `backward`: if W is a separate action, B takes the rest.
        exchange: the part of one layer's forward, and of its backward, in which tensor-parallel ranks exchange activations.
            Another action in the same step can compute meanwhile.
        recompute: a layer in each recompute mode whose costs are known, by the mode's name, except a layer that recomputes in
            full.
        attended_bytes_per_token: held when the backward of its attention has made the gradient of K and V; None if unknown,
            then all bytes of the layer are assumed.
        apart_bytes_per_token: peak of a layer during a backward with split weight gradient, which keeps what that needs; None
            if unknown.
        apart_attended_bytes_per_token: `attended_bytes_per_token` of such a backward; None if unknown.
        weight_bytes_per_token: needed by a layer's W after its B: inputs and output gradients of the linear layers.
        workspace_bytes: held only while a pass runs, independent of its tokens: a block's logits.
    """

    forward: Line = NO_TIME
    backward: Line = NO_TIME
    weight: Line = NO_TIME
    exchange: Line = NO_TIME
    recompute: dict[str, ModeCosts] = field(default_factory=dict, hash=False)
    attended_bytes_per_token: float | None = None
    apart_bytes_per_token: float | None = None
    apart_attended_bytes_per_token: float | None = None
    weight_bytes_per_token: float = 0.0
    workspace_bytes: int = 0


ATTENTION, MLP = "attention", "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfLayer:
    """Half of a layer that a stage has besides its layers; it never recomputes.

    Attributes:
        kind: ``attention`` (at the stage's end), ``mlp`` (at its start), or empty for no half.
        forward, backward, weight: its times, see `LayerCosts`.
        bytes_per_token: kept from forward to backward, K and V included.
        weight_bytes_per_token: needed by its W after its B.
    """

    kind: str = ""
    forward: Line = NO_TIME
    backward: Line = NO_TIME
    weight: Line = NO_TIME
    bytes_per_token: float = 0.0
    weight_bytes_per_token: float = 0.0

    @property
    def num_cached_layers(self) -> int:
        """Number of layers whose K and V it caches: 1 for attention."""
        return int(self.kind == ATTENTION)


NO_HALF = HalfLayer()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts(LayerCosts):
    """Time and memory of one pipeline stage.

    A stage that begins with the MLP of a layer and ends with the attention of another counts the two as one of its layers: they
    take as long, keep as much, and recompute together.

    Attributes:
        num_layers: transformer layers of the stage; the fields of `LayerCosts` are of each of them.
        half: half of a layer that the stage has in addition.
        extra_forward: the stage's work besides its layers: embedding, or final norm, logits and loss.
        extra_backward: the same, backward.
        extra_weight: the same, weight gradient, a part of `extra_backward`.
        layer_bytes_per_token: kept from forward to backward by a layer that does not recompute, its K and V included.
        full_bytes_per_token: peak of such a layer, or of one that recomputes in full, while its backward runs; None if it is
            `layer_bytes_per_token`.
        recomputed_layer_bytes_per_token: kept by a layer that recomputes in full: its input.
        extra_bytes_per_token: kept by the stage independent of its layers: embedding output or received input, logits, loss.
        head_bytes_per_token: the part of these that backward frees before it reaches the layers: logits, loss.
        kv_bytes_per_token: K and V of one layer.
        kv_gradient_bytes_per_token: their gradient while it is accumulated; None if it takes as much as K and V.
        many_kv_gradient_bytes_per_token: the same for sequences with more slices than `sizing.MOST_ROUNDED_SLICES`; None if
            it is the same size.
        kv_heads: heads of keys and values that a rank has inside attention; 1 if unknown.
        queries_per_key: query heads that share one of them.
        extra_weight_bytes_per_token: `weight_bytes_per_token` of the stage's extras.
        static: weights, gradients, optimizer state.
        working_bytes_per_token: held only while a pass runs, for its current layer: gradients, workspace of its kernels.
        first_mlp_bytes_per_token: kept by the MLP at the stage's start if it counts as one layer with the attention at the
            stage's end: backward comes to that attention first and to the MLP last, so these bytes go later than a layer's.
    """

    num_layers: int
    half: HalfLayer = NO_HALF
    forward: Line
    backward: Line
    extra_forward: Line = NO_TIME
    extra_backward: Line = NO_TIME
    extra_weight: Line = NO_TIME
    layer_bytes_per_token: float
    full_bytes_per_token: float | None = None
    recomputed_layer_bytes_per_token: float
    extra_bytes_per_token: float = 0.0
    head_bytes_per_token: float = 0.0
    kv_bytes_per_token: float
    kv_gradient_bytes_per_token: float | None = None
    many_kv_gradient_bytes_per_token: float | None = None
    kv_heads: int = 1
    queries_per_key: int = 1
    extra_weight_bytes_per_token: float = 0.0
    static: Static = NO_STATIC
    working_bytes_per_token: float = 0.0
    first_mlp_bytes_per_token: float = 0.0

    @property
    def num_halves(self) -> int:
        """Half layers of the stage: twice its layers, and one more if it has a half."""
        return 2 * self.num_layers + (self.half.kind != "")

    @property
    def num_cached_layers(self) -> int:
        """Number of layers whose keys and values the stage caches: layers whose attention it has."""
        return self.num_layers + self.half.num_cached_layers

    @property
    def static_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.static.num_bytes

    def mode(self, name: str) -> ModeCosts | None:
        """Costs of a recompute mode by its name in `plan.recompute.MODES`; None if unknown."""
        if name == FULL:
            return ModeCosts(self.forward, self.recomputed_layer_bytes_per_token)
        return self.recompute.get(name)

    def kv_gradient_per_token(self, work: ChunkWork) -> TimeColumn:
        """Bytes per token of the gradient of one layer's keys and values while it is accumulated, for each chunk's sequence."""
        few = self.kv_bytes_per_token if self.kv_gradient_bytes_per_token is None else self.kv_gradient_bytes_per_token
        many = few if self.many_kv_gradient_bytes_per_token is None else self.many_kv_gradient_bytes_per_token
        return np.where(work.num_slices > MOST_ROUNDED_SLICES, many, few)

    def peaks_per_token(self, mode: str, split: bool) -> tuple[float, float]:
        """Bytes per token of one layer when its backward begins, and when its attention has made the gradient of K and V.

        Args:
            mode: recompute mode; empty for none.
            split: the weight gradient is split, so the backward keeps the tensors that it needs.
        """
        if split:
            everything = self.layer_bytes_per_token + self.weight_bytes_per_token
            sizes = self.apart_bytes_per_token, self.apart_attended_bytes_per_token
        else:
            own = self.mode(mode) if mode else None
            everything = self.layer_bytes_per_token if self.full_bytes_per_token is None else self.full_bytes_per_token
            sizes = None if own is None else own.full_bytes_per_token, self.attended_bytes_per_token
        full, attended = sizes
        if attended is not None and (split or not mode):  # the attention at the stage's end is reached before this MLP is freed
            attended += self.first_mlp_bytes_per_token
        return everything if full is None else full, everything if attended is None else attended

    @property
    def stage_forward(self) -> Line:
        """Time of the stage's whole forward."""
        return self.forward.scaled(self.num_layers) + self.half.forward + self.extra_forward

    @property
    def stage_backward(self) -> Line:
        """Time of the stage's whole backward, without recompute."""
        return self.backward.scaled(self.num_layers) + self.half.backward + self.extra_backward

    @property
    def stage_weight(self) -> Line:
        """Time of all weight gradients of the stage, a part of `stage_backward`."""
        return self.weight.scaled(self.num_layers) + self.half.weight + self.extra_weight

    @property
    def stage_input(self) -> Line:
        """Time of a backward whose weight gradients are split off."""
        return self.stage_backward.without(self.stage_weight)

    @property
    def extra_input(self) -> Line:
        """Time of the extras in such a backward."""
        return self.extra_backward.without(self.extra_weight)

    @property
    def stage_exchange(self) -> Line:
        """Time of the exchange in the stage's forward, equal to its backward's; a half layer has half of a layer's exchange."""
        return self.exchange.scaled(self.num_halves / 2)


def check_modes(layer: LayerCosts, name: str) -> None:
    """Raise `EppError` if a layer has costs of a recompute mode that is not known; `name` is the layer's in errors."""
    for mode in layer.recompute:
        if mode not in MODES:
            raise EppError(f"{name}.recompute.{printable(mode)} is unknown; modes are {', '.join(MODES)}")


def check_stage(stage: StageCosts, name: str) -> None:
    """Refuse costs of which parts exceed the whole.

    Args:
        stage: the costs.
        name: of the stage, for errors.

    Raises:
        EppError: weight gradients take longer than the backward, or a half layer or recompute mode is not known.
    """
    check_modes(stage, name)
    check_part(f"{name}.weight", stage.weight, stage.backward)
    check_part(f"{name}.extra_weight", stage.extra_weight, stage.extra_backward)
    check_part(f"{name}.half.weight", stage.half.weight, stage.half.backward)
    if stage.half.kind not in ("", ATTENTION, MLP):
        raise EppError(f"{name}.half.kind is {shown(stage.half.kind)}; it is {ATTENTION}, {MLP} or empty")
