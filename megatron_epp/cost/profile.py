"""A profile: costs of one layer, the embedding and the head of a model on one machine, from which any pipeline is composed.

JSON form, times in microseconds and sizes in bytes, everything per rank::

    {"schema": "megatron-epp/profile", "version": 1, "name": "measured:h100", "origin": {...},
     "layer": {"forward": {"fixed_us": 90.0, "per_token_us": 0.8, "per_pair_us": 4e-05}, "backward": {...}, "weight": {...},
               "bytes_per_token": 180000.0, "weight_bytes_per_token": 150000.0, "parameters": 218103808,
               "recompute": {"mlp": {"again": {"fixed_us": 40.0, ...}, "bytes_per_token": 90000.0}, ...}},
     "embedding": {...}, "head": {...}, "recomputed_layer_bytes_per_token": 8192.0, ...}

`origin` records the source of the figures (machine, versions, date, model shape, residuals); nothing is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_epp.cost.hardware import divide
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.serialize import Form, check_part
from megatron_epp.cost.stage import LayerCosts, StageCosts
from megatron_epp.cost.work import NO_TIME
from megatron_epp.plan import EppError

_FP32_BYTES = 4
FORM = Form("profile", "megatron-epp/profile", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(LayerCosts):
    """One layer, or the embedding, or the head (final norm, logits, loss). Only a layer has recompute modes and peaks.

    Attributes:
        bytes_per_token: kept from forward to backward.
        parameters: on one rank.
        largest_weight: parameters of the largest weight whose gradient is a separate tensor before it is accumulated; 0 if
            unknown.
    """

    bytes_per_token: float = 0.0
    parameters: float = 0.0
    largest_weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of a model's parts on one machine.

    Attributes:
        name: for the plan's record.
        num_layers: of the profiled model; a pipeline made from the profile may have another number.
        layer, embedding, head: the parts.
        recomputed_layer_bytes_per_token, kv_bytes_per_token, kv_heads, queries_per_key: as in `StageCosts`.
        hidden_bytes_per_token, message_latency_us, message_us_per_byte: as in `PipelineCosts`.
        weight_bytes: of a weight as the model computes with it.
        stage_ranks: ranks that share each layer, tensor and context parallel.
        host_latency_us, host_us_per_byte: of a copy between device and host, either way, of a device that does not share the
            link; infinite if there is no link.
        host_sharing: consecutive devices that share that link.
        origin: machine, versions, date, shape, residuals.
    """

    name: str
    num_layers: int
    layer: Part
    embedding: Part = Part()
    head: Part = Part()
    recomputed_layer_bytes_per_token: float
    kv_bytes_per_token: float
    kv_heads: int = 1
    queries_per_key: int = 1
    hidden_bytes_per_token: float
    weight_bytes: float = 2.0
    message_latency_us: float = 0.0
    message_us_per_byte: float = 0.0
    stage_ranks: int = 1
    host_latency_us: float = 0.0
    host_us_per_byte: float = math.inf
    host_sharing: int = 1
    origin: dict[str, Any] = field(default_factory=dict, compare=False)

    def costs(
        self, layers_per_stage: Sequence[int], *, state_bytes_per_parameter: float = 18.0, replicas: int = 1
    ) -> PipelineCosts:
        """Costs of a pipeline of this model. The first stage embeds; the last has the head.

        Args:
            layers_per_stage: layers of each stage.
            state_bytes_per_parameter: weight, gradient and optimizer state; 18 is bf16 Adam with fp32 gradients and master
                weights and nothing sharded. With a distributed optimizer over d replicas it is 6 + 12 / d.
            replicas: data-parallel ranks between one stage's ranks and the next's, which matters if devices share a link to the
                host.

        Raises:
            EppError: a stage has a negative number of layers, or there is no stage.
        """
        if min(layers_per_stage, default=-1) < 0:
            raise EppError(f"stages of {list(layers_per_stage)} layers make no pipeline")
        last = len(layers_per_stage) - 1
        at_once, turns = divide(self.host_sharing, self.stage_ranks * replicas)
        return PipelineCosts(
            name=self.name,
            stages=tuple(
                self._stage(layers, stage == 0, stage == last, state_bytes_per_parameter)
                for stage, layers in enumerate(layers_per_stage)
            ),
            hidden_bytes_per_token=self.hidden_bytes_per_token,
            message_latency_us=self.message_latency_us,
            message_us_per_byte=self.message_us_per_byte,
            host_latency_us=self.host_latency_us,
            host_us_per_byte=at_once * self.host_us_per_byte,
            host_turns=turns,
        )

    def _stage(self, layers: int, first: bool, last: bool, state_bytes: float) -> StageCosts:
        extras = [part for part, there in ((self.embedding, first), (self.head, last)) if there]
        parameters = layers * self.layer.parameters + sum(part.parameters for part in extras)
        of_layer: dict[str, Any] = {one.name: getattr(self.layer, one.name) for one in fields(LayerCosts)}
        return StageCosts(
            **of_layer | {"workspace_bytes": sum(part.workspace_bytes for part in extras)},
            num_layers=layers,
            extra_forward=sum((part.forward for part in extras), NO_TIME),
            extra_backward=sum((part.backward for part in extras), NO_TIME),
            extra_weight=sum((part.weight for part in extras), NO_TIME),
            layer_bytes_per_token=self.layer.bytes_per_token,
            recomputed_layer_bytes_per_token=self.recomputed_layer_bytes_per_token,
            extra_bytes_per_token=self.hidden_bytes_per_token + sum(part.bytes_per_token for part in extras),
            head_bytes_per_token=self.head.bytes_per_token if last else 0.0,
            kv_bytes_per_token=self.kv_bytes_per_token,
            many_kv_gradient_bytes_per_token=self.kv_bytes_per_token * _FP32_BYTES / self.weight_bytes,
            kv_heads=self.kv_heads,
            queries_per_key=self.queries_per_key,
            extra_weight_bytes_per_token=sum(part.weight_bytes_per_token for part in extras),
            static=Static.of(parameters, state_bytes, self.weight_bytes),
        )

    def adam_bytes(self, replicas: int = 1) -> float:
        """Bytes of a parameter with its gradient and Adam's state, which replicas shard: its moments, and an fp32 copy of the
        weight if the weight is not fp32.
        """
        return self.weight_bytes + 4 + (12 if self.weight_bytes < 4 else 8) / replicas

    def gradient_buffers(self, num_stages: int) -> list[int]:
        """Bytes of the largest weight's gradient on each stage."""
        sizes = [self.layer.largest_weight] * num_stages
        sizes[0] = max(sizes[0], self.embedding.largest_weight)
        sizes[-1] = max(sizes[-1], self.head.largest_weight)
        return [int(size * self.weight_bytes) for size in sizes]

    def to_json(self) -> str:
        """Return canonical JSON; `from_json` gives an equal object. A missing link to the host is written as null."""
        return FORM.write(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read `to_json`. Raises `EppError` for any other text."""
        return FORM.read(Profile, text, _check)


def _check(profile: Profile) -> None:
    for name in ("layer", "embedding", "head"):
        part: Part = getattr(profile, name)
        check_part(f"{name}.weight", part.weight, part.backward)
