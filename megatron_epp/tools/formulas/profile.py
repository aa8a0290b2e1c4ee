"""A profile: costs of one layer, the embedding and the head of a model on one machine, from which any pipeline is composed.

JSON form, times in microseconds and sizes in bytes, everything per rank::

    {"schema": "megatron-epp/profile", "version": 1, "name": "measured:h100", "origin": {...},
     "layer": {"forward": {"fixed_us": 90.0, "per_token_us": 0.8, "per_pair_us": 4e-05}, "backward": {...}, "weight": {...},
               "bytes_per_token": 180000.0, "weight_bytes_per_token": 150000.0, "parameters": 218103808,
               "recompute": {"mlp": {"again": {"fixed_us": 40.0, ...}, "bytes_per_token": 90000.0}, ...}},
     "attention": {...}, "embedding": {...}, "head": {...}, "recomputed_layer_bytes_per_token": 8192.0, ...}

`origin` records the source of the figures (machine, versions, date, model shape, residuals); nothing is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from itertools import accumulate
from typing import Any

from megatron_epp.cost.blocks import (
    CODEC,
    HANDOVER,
    HEAD,
    INPUT,
    LAYER,
    PREDICTION,
    BlockCosts,
    PartCosts,
    StageCosts,
    check_part,
    check_within,
)
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import OptimizerBytes, Parameters
from megatron_epp.cost.output_layer import ShardBytes, VocabularyShards
from megatron_epp.cost.work import NO_TIME, LinearTime, ModeCosts
from megatron_epp.plan import EppError
from megatron_epp.plan.codec import FileFormat
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.sizing import FP32_BYTES
from megatron_epp.tools.formulas.device import on_device
from megatron_epp.tools.formulas.hardware import divide

_OF_PART = tuple(field.name for field in fields(PartCosts))
_PASSES = ("forward", "backward", "weight")
_TIMES, _KEPT = (*_PASSES, "exchange"), ("bytes_per_token", "weight_bytes_per_token")
_PARTS = ("layer", "dense_layer", "attention", "embedding", "head", "prediction")
FORMAT = FileFormat("profile", "megatron-epp/profile", 1, CODEC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart(PartCosts):
    """One layer, or the embedding, or the head (final norm, logits, loss). Only a layer has recompute modes and peaks."""

    parameters: float = 0.0  # on one rank
    expert_parameters: float = 0.0  # of experts, among these
    # parameters of the largest weight whose gradient is a separate tensor before it is accumulated; 0 if unknown
    largest_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of a model's parts on one machine."""

    name: str  # for the plan's record
    num_layers: int  # of the profiled model; a pipeline made from the profile may have another number
    # layer, embedding, head: the parts
    layer: ModelPart
    attention: ModelPart  # the part of a layer up to the MLP's norm
    embedding: ModelPart = ModelPart()
    head: ModelPart = ModelPart()
    # A layer with one MLP, in a model whose other layers have experts; None if all layers are alike
    dense_layer: ModelPart | None = None
    dense_layers: tuple[int, ...] = ()  # numbers of the layers that it stands for, from 0
    prediction: ModelPart = ModelPart()  # a depth of multi-token prediction without its logits
    predictions: int = 0  # how many depths there are, on the last stage
    cached_predictions: int = 0  # keys and values of these, which all attend, in numbers of the mean layer's; 0: one for each
    recomputed_layer_bytes_per_token: float  # kept by a layer that recomputes in full: its input
    # kv_bytes_per_token, kv_heads, queries_per_key, expanded_bytes_per_token, expanded_heads: see `KVBytes`
    kv_bytes_per_token: float
    kv_heads: int = 1
    queries_per_key: int = 1
    expanded_bytes_per_token: float = 0.0
    expanded_heads: int = 0
    handed_bytes: float = 0.0  # that a layer hands on to the next slice alone, in the mean of the layers
    handed_tokens: int = 0  # tokens of a sequence from which on it does; fewer have a part of them
    # hidden_bytes_per_token, message_latency_us, message_us_per_byte: see `PipelineCosts`
    hidden_bytes_per_token: float
    weight_bytes: float = 2.0  # of a weight as the model computes with it
    message_latency_us: float = 0.0
    message_us_per_byte: float = 0.0
    stage_ranks: int = 1  # ranks that share each layer, tensor and context parallel
    # host_latency_us, host_us_per_byte: of a copy between device and host, either way, of a device that does not share
    # the link; infinite if there is no link
    host_latency_us: float = 0.0
    host_us_per_byte: float = math.inf
    copy_us_per_byte: float = 0.0  # see `PipelineCosts`
    host_sharing: int = 1  # consecutive devices that share that link
    context_exchange_us: tuple[float, ...] = ()  # see `PipelineCosts`
    shards: ShardBytes | None = None  # what shards of the output layer hold; None in a file from before it was recorded
    exchange_bytes_per_token: float = 0.0  # see `PipelineCosts`
    cast_bytes: float = 0.0  # of the casts to FP8 of a parameter of a layer
    uncast_bytes_per_token: float = 0.0  # see `on_device`
    least_working_bytes_per_token: float = 0.0  # see `on_device`
    origin: dict[str, Any] = field(default_factory=dict, compare=False)  # machine, versions, date, shape, residuals

    def costs(
        self,
        layers_per_stage: Sequence[int],
        *,
        state_bytes_per_parameter: float = 18.0,
        optimizer: OptimizerBytes | None = None,
        replicas: int = 1,
        vocabulary_shares: Sequence[float] = (),
    ) -> PipelineCosts:
        """Costs of a pipeline of this model, whose first stage embeds; the last has the head unless ranks have shares of it.

        Without an `optimizer`, 18 bytes of a parameter are those of bf16 Adam with fp32 gradients and master weights; with a
        distributed optimizer over d ranks these are 6 + 12 / d. `replicas` matter if devices share a link to the host. Raises
        `EppError` if there is no stage, or layers are negative.
        """
        if min(layers_per_stage, default=-1) < 0:
            raise EppError(f"stages of {list(layers_per_stage)} layers make no pipeline")
        last = len(layers_per_stage) - 1
        stage_of, stages = cache(self._stage), []
        for stage, (count, first) in enumerate(zip(layers_per_stage, accumulate(layers_per_stage, initial=0), strict=False)):
            share = vocabulary_shares[stage] if stage < len(vocabulary_shares) else 0.0
            dense = sum(first <= layer < first + count for layer in self.dense_layers)
            kind = count, dense, stage == 0, stage == last and not vocabulary_shares, share
            stages.append(stage_of(*kind, optimizer or state_bytes_per_parameter))
        at_once, turns = divide(self.host_sharing, self.stage_ranks * replicas)
        return PipelineCosts(
            name=self.name,
            stages=tuple(stages),
            hidden_bytes_per_token=self.hidden_bytes_per_token,
            message_latency_us=self.message_latency_us,
            message_us_per_byte=self.message_us_per_byte,
            host_latency_us=self.host_latency_us,
            host_us_per_byte=at_once * self.host_us_per_byte,
            copy_us_per_byte=self.copy_us_per_byte,
            host_turns=turns,
            vocabulary=self._shards(vocabulary_shares) if vocabulary_shares else None,
            context_exchange_us=self.context_exchange_us,
        )

    def costs_on_device(
        self, layout: Layout, optimizer: OptimizerBytes, replicas: int, fragmentation_share: float | None = None
    ) -> PipelineCosts:
        """Costs of the stages of a layout (`costs`) with the device memory that autograd does not keep (`on_device`)."""
        costs = self.costs(layout.layers, optimizer=optimizer, replicas=replicas, vocabulary_shares=layout.vocabulary_shares)
        return on_device(costs, fragmentation_share, buffers=self.gradient_buffers(len(layout.layers)), held=self)

    def training(self, share: float) -> Profile:
        """Return the costs if only a share of all parameters train: backwards compute that share of weight gradients."""
        if share == 1.0:
            return self
        on_rank = self.num_layers * self.mean_layer.parameters + self.embedding.parameters + self.head.parameters
        parts = {name: part for name in _PARTS if (part := getattr(self, name)) is not None}
        changed: dict[str, Any] = {name: _training(part, share, share * on_rank) for name, part in parts.items()}
        return replace(self, **changed)

    def _shards(self, shares: Sequence[float]) -> VocabularyShards:
        """Divide the head over shards.

        `S` makes logits and the input's gradient, `T` the weight gradient and in a loss by blocks the logits once more: half of
        the head's backward, or two thirds, as its products with the weight all take as long. The broadcast carries a message's
        bytes; the reduction carries fp32 gradients, once towards the last stage.
        """
        if self.shards is None:
            raise EppError(
                "the profile does not say what shards of the output layer hold: write it again with megatron-epp profile"
            )
        head, is_blocked = self.head, self.head.workspace_bytes > 0
        gradient = head.backward.scaled(2 / 3) if is_blocked else head.weight
        if gradient == NO_TIME:
            gradient = head.backward.scaled(0.5)
        logits = head.forward + head.backward.without(gradient)
        hops, fp32_bytes = max(0, len(shares) - 1), self.hidden_bytes_per_token * FP32_BYTES / self.weight_bytes
        latency = LinearTime(math.ceil(math.log2(max(1, len(shares)))) * self.message_latency_us)

        def moved(num_bytes: float) -> LinearTime:
            return (latency + LinearTime(0.0, self.message_us_per_byte * num_bytes)) if hops else NO_TIME

        return VocabularyShards(
            shares=tuple(shares),
            logits=logits,
            gradient=gradient,
            **asdict(self.shards),
            spread=moved(self.hidden_bytes_per_token),
            gather=moved(fp32_bytes),
        )

    @property
    def mean_layer(self) -> ModelPart:
        """Costs of a layer in the mean of the model's."""
        if self.dense_layer is None:
            return self.layer
        return mean_of(self.layer, self.dense_layer, min(1.0, len(self.dense_layers) / self.num_layers))

    def _stage(
        self,
        layers: int,
        dense: int,
        first: bool,
        last: bool,
        share: float,
        held: OptimizerBytes | float,
    ) -> StageCosts:
        layer, dense_layer = self.layer, self.dense_layer or self.layer
        if dense:
            layer = dense_layer if dense == layers else mean_of(layer, dense_layer, dense / layers)
        depths, ahead = (self.predictions, self.prediction) if last else (0, ModelPart())
        parts = (layers, layer), (depths, ahead)
        inside = sum(count * part.parameters for count, part in parts)
        experts = sum(count * part.expert_parameters for count, part in parts)
        reads = first or depths > 0  # tokens ahead are embedded on the last stage
        extras = [part for part, there in ((self.embedding, reads), (self.head, last)) if there]
        others = sum(part.parameters for part in extras) + share * self.head.parameters
        wide = self.kv_bytes_per_token * FP32_BYTES / self.weight_bytes
        kv = KVBytes(
            bytes_per_token=self.kv_bytes_per_token,
            many_gradient_bytes_per_token=wide,
            heads=self.kv_heads,
            queries_per_key=self.queries_per_key,
            expanded_bytes_per_token=self.expanded_bytes_per_token,
            expanded_heads=self.expanded_heads,
        )
        attends = {"input_bytes_per_token": self.recomputed_layer_bytes_per_token, "kv": kv}
        most = max(self.layer.bytes_per_token, dense_layer.bytes_per_token) if 0 < dense < layers else None
        blocks = [block_of(LAYER, layer, count=layers, full_bytes_per_token=most, **attends)]
        if isinstance(held, OptimizerBytes):
            of_stage = Parameters(
                matrices=inside - experts,
                experts=experts,
                others=others,
                largest=max(self.layer.largest_weight, dense_layer.largest_weight),
                largest_other=max((part.parameters for part in extras), default=share * self.head.parameters),
            )
            static = held.static(of_stage)
        else:
            static = Static.of(inside + others, held, self.weight_bytes)
        static = replace(static, weights=static.weights + int(inside * self.cast_bytes))
        received = block_of(INPUT, self.embedding if first else ModelPart())
        received = replace(received, bytes_per_token=self.hidden_bytes_per_token + received.bytes_per_token)
        if depths:
            blocks.append(_times(block_of(PREDICTION, ahead, **attends), depths, count=self.cached_predictions or depths))
        head = [_times(block_of(HEAD, self.head), 1 + depths)] if last else []
        handed_bytes = self.handed_bytes * sum(block.count for block in blocks if block.kv is not None)
        if handed_bytes:
            blocks.insert(0, BlockCosts(kind=HANDOVER, state_bytes=handed_bytes, state_tokens=self.handed_tokens))
        return StageCosts((received, *blocks, *head), static)

    def gradient_buffers(self, num_stages: int) -> list[int]:
        """Bytes of the largest weight's gradient on each stage."""
        dense = 0.0 if self.dense_layer is None else self.dense_layer.largest_weight
        sizes = [max(self.layer.largest_weight, dense)] * num_stages
        sizes[0] = max(sizes[0], self.embedding.largest_weight)
        sizes[-1] = max(sizes[-1], self.head.largest_weight)
        return [int(size * self.weight_bytes) for size in sizes]

    def to_json(self) -> str:
        """Return canonical JSON; `from_json` gives an equal object. A missing link to the host is written as null."""
        return FORMAT.write(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read `to_json`. Raises `EppError` for any other text."""
        return FORMAT.read(Profile, text, _check)


def mlp_of(whole: ModelPart, attention: ModelPart) -> ModelPart:
    """Costs of a layer's MLP: the layer's without its attention's."""
    times = {name: getattr(whole, name).without(getattr(attention, name)) for name in _PASSES}
    sizes = {name: max(0.0, getattr(whole, name) - getattr(attention, name)) for name in (*_KEPT, "parameters")}
    return ModelPart(expert_parameters=whole.expert_parameters, **times | sizes)


def _training(part: ModelPart, share: float, most: float) -> ModelPart:
    # By blocks a loss has no weight gradient of its own: its backward has that product and another one more than its forward.
    weight = part.weight if not part.workspace_bytes else part.backward.without(part.forward).scaled(0.5)
    backward, largest = part.backward.without(weight.scaled(1 - share)), min(part.largest_weight, most)
    return replace(part, backward=backward, weight=part.weight.scaled(share), largest_weight=largest)


def mean_of(routed: ModelPart, dense: ModelPart, share: float) -> ModelPart:
    """Return the mean of layers of two kinds: times and kept bytes are linear in layers; of two peaks it has the larger."""

    def mean(first: Any, second: Any) -> Any:
        if isinstance(first, LinearTime):
            return first.scaled(1 - share) + second.scaled(share)
        return (1 - share) * first + share * second

    def mode(first: ModeCosts, second: ModeCosts) -> ModeCosts:
        peaks = (own.full_bytes_per_token or layer.bytes_per_token for own, layer in ((first, routed), (second, dense)))
        return ModeCosts(mean(first.again, second.again), mean(first.bytes_per_token, second.bytes_per_token), max(peaks))

    def larger(first: float | None, second: float | None) -> float | None:
        return None if first is None or second is None else max(first, second)

    peaks = "attended_bytes_per_token", "apart_bytes_per_token", "apart_attended_bytes_per_token"
    mixed: dict[str, Any] = {name: larger(getattr(routed, name), getattr(dense, name)) for name in peaks}
    mixed["largest_weight"] = max(routed.largest_weight, dense.largest_weight)
    for name in (*_TIMES, *_KEPT, "parameters", "expert_parameters"):
        mixed[name] = mean(getattr(routed, name), getattr(dense, name))
    mixed["recompute"] = {
        name: mode(own, dense.recompute[name]) for name, own in routed.recompute.items() if name in dense.recompute
    }
    return replace(routed, **mixed)


def _times(block: BlockCosts, number: int, count: int = 1) -> BlockCosts:
    """Return a block with the times and kept bytes of so many; they run one after the other."""
    lines = {name: getattr(block, name).scaled(number) for name in _TIMES}
    sizes = {name: number * getattr(block, name) for name in _KEPT}
    return replace(block, count=count, **lines, **sizes) if number > 1 else replace(block, count=count)


def block_of(kind: str, part: ModelPart, **more: Any) -> BlockCosts:
    of_part: dict[str, Any] = {name: getattr(part, name) for name in _OF_PART}
    return BlockCosts(kind=kind, **of_part | {"weight": part.weight.within(part.backward)} | more)


def _check(profile: Profile) -> None:
    if profile.dense_layers and profile.dense_layer is None:
        raise EppError("dense_layers names layers, and there is no dense_layer")
    for name in ("layer", "embedding", "head"):
        check_part(getattr(profile, name), name)
    for name in _PASSES:
        check_within(getattr(profile.attention, name), getattr(profile.layer, name), f"attention.{name}")
