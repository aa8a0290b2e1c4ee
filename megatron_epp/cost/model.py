"""The cost model of the planners: time linear in tokens and attention pairs, memory in bytes per token.

The form is InfiniPipe's (section III): attention costs per pair, everything else per token, and every pass has a fixed part.
Coefficients come from `analytic_costs` or from measurement; either way they are these dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_epp.cost.fields import build, check_part
from megatron_epp.cost.kv_offload import Hosting, hosting
from megatron_epp.cost.line import NO_TIME, Level, Line, TimeColumn
from megatron_epp.cost.memory import HEAD, INPUTS, LAYERS, LEVEL_ITEMS, LOSS_BLOCK, WORKING
from megatron_epp.cost.prefix import prefix_bytes
from megatron_epp.cost.stage import StageCosts
from megatron_epp.cost.text import Form
from megatron_epp.cost.work import ChunkWork, IntColumn, LayerPeak
from megatron_epp.plan import LEVELS, NO_RECOMPUTE, EppError, Recompute
from megatron_epp.plan.size_class import size_classes

_FORM = Form("cost profile", "megatron-epp/costs", 1)
_IN_OLDER_FILES = "message_bytes_per_token"
"""Field of a stage in older files; now `PipelineCosts.message_bytes_per_token`."""


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of every stage and of the messages between them. Implements `megatron_epp.cost.protocol.Costs`.

    Attributes:
        name: of the profile; the plan records it.
        stages: one entry per stage, first to last.
        hidden_bytes_per_token: bytes that a message carries per padded token.
        message_bytes_per_token: device memory of a message per padded token; 0 if messages in flight are not counted.
        message_latency_us: fixed time of a message.
        message_us_per_byte: time per byte.
        host_latency_us: fixed time of a copy between device and host, either way.
        host_us_per_byte: time per byte; infinite if nothing can be offloaded.
        host_turns: consecutive pipeline ranks that share a link to the host and take turns on it (`host_link.divide`).
        offloadable_share: largest share of a chunk's activation bytes that may be offloaded.
        fragmentation_share: share of the bytes held by chunks that an allocator loses between its blocks. Included in every
            size except `static`.
    """

    name: str
    stages: tuple[StageCosts, ...]
    hidden_bytes_per_token: float
    message_latency_us: float = 0.0
    message_us_per_byte: float = 0.0
    host_latency_us: float = 0.0
    host_us_per_byte: float = math.inf
    host_turns: int = 1
    offloadable_share: float = 1.0
    fragmentation_share: float = 0.0
    message_bytes_per_token: float = 0.0

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def alike(self) -> tuple[int, ...]:
        """Index of the first stage with the same costs, for each stage."""
        return tuple(map(self.stages.index, self.stages))

    @property
    def splits_weight(self) -> bool:
        """True if the weight gradient has a separate time, so that W can be a separate action."""
        return any(stage.stage_weight != NO_TIME for stage in self.stages)

    @property
    def recompute_levels(self) -> tuple[str, ...]:
        """Recompute modes whose costs are known for all stages, most recompute first."""
        return tuple(name for name in LEVELS if all(stage.level(name) is not None for stage in self.stages))

    def forward_line(self, stage: int) -> Line:
        return self.stages[stage].stage_forward

    def backward_line(self, stage: int) -> Line:
        return self.stages[stage].stage_backward

    def forward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        return self.stages[stage].stage_forward.time_us(work.tokens, work.pairs)

    def backward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        return self.stages[stage].stage_backward.time_us(work.tokens, work.pairs)

    def weight_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the weight gradients, a part of `backward_us`."""
        return self.stages[stage].stage_weight.time_us(work.tokens, work.pairs)

    def recompute_us(self, stage: int, work: ChunkWork, recompute: Recompute) -> TimeColumn:
        """Time that recompute adds to the backward."""
        levels = self._levels(stage, recompute)
        return sum((count * level.again.time_us(work.tokens, work.pairs) for _, count, level in levels), 0.0 * work.tokens)

    def activation_bytes(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> IntColumn:
        """Bytes kept from forward to backward, without the cache of a sliced sequence's keys and values."""
        parts = self._kept_per_token(stage, work, recompute)
        return self._whole_bytes(sum((more for _, more in parts), 0.0 * work.tokens) * work.tokens)

    def activation_items(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> dict[str, IntColumn]:
        """Bytes of `activation_bytes` by item; their sum is `activation_bytes`."""
        items: dict[str, IntColumn] = {}
        per_token, before = 0.0 * work.tokens, np.zeros(len(work.tokens), dtype=np.int64)
        for name, more in self._kept_per_token(stage, work, recompute):
            per_token = per_token + more
            after = self._whole_bytes(per_token * work.tokens)
            items[name], before = after - before, after
        return items

    def _kept_per_token(self, stage: int, work: ChunkWork, recompute: Recompute) -> Iterator[tuple[str, TimeColumn]]:
        costs = self.stages[stage]
        yield LAYERS, (costs.num_layers - recompute.num_layers) * self._layer_per_token(stage, work, "")
        for name, count, _ in self._levels(stage, recompute):
            yield LEVEL_ITEMS[name], count * self._layer_per_token(stage, work, name)
        everywhere = np.ones(len(work.tokens))
        yield INPUTS, (costs.extra_bytes_per_token - costs.head_bytes_per_token) * everywhere
        yield HEAD, costs.head_bytes_per_token * everywhere

    def _layer_per_token(self, stage: int, work: ChunkWork, level: str) -> TimeColumn:
        if level == "":
            return self.stages[stage].layer_bytes_per_token - self._in_cache(stage, work)
        (_, _, own), *_ = self._levels(stage, NO_RECOMPUTE._replace(**{level: 1}))
        return own.bytes_per_token - self._in_cache(stage, work) * (level == "mlp")

    def _in_cache(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Bytes per token of a layer's kept activations that are in the sequence's key and value cache."""
        return np.where(work.sliced, self.stages[stage].kv_bytes_per_token, 0.0)

    def _gradient_of_layer(self, stage: int, work: ChunkWork) -> TimeColumn:
        return self.stages[stage].kv_gradient_per_token(work) * work.cache_tokens

    def _levels(self, stage: int, recompute: Recompute) -> Iterator[tuple[str, int, Level]]:
        for name, count in zip(LEVELS, recompute, strict=True):
            if count:
                level = self.stages[stage].level(name)
                if level is None:
                    raise EppError(f"the costs of stage {stage} do not know recompute level {name!r}; measure them again")
                yield name, count, level

    def weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held from the end of B to the end of W if the two are split."""
        costs = self.stages[stage]
        per_token = costs.num_layers * costs.weight_bytes_per_token + costs.extra_weight_bytes_per_token
        return self._whole_bytes(per_token * work.tokens)

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of one layer among `weight_bytes`."""
        return self._whole_bytes(self.stages[stage].weight_bytes_per_token * work.tokens)

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of keys and values, in all layers, of the whole sequence that a chunk holds a slice of, in buffers rounded up
        by `size_classes`.
        """
        costs = self.stages[stage]
        return self._whole_bytes(costs.num_layers * costs.kv_bytes_per_token * size_classes(work.cache_tokens))

    def hosting(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> Hosting:
        """Time and memory of KV offload of slices.

        Args:
            stage: number of the stage.
            work: of the chunks.
            sharing: factor by which the link is slower because its rank also uses it for other copies. Other ranks that share
                the link stream slices of the same sequence at the same times.
        """

        def copy_us(per_token: float | TimeColumn, tokens: IntColumn) -> TimeColumn:
            return sharing * self.host_turns * (2 * self.host_latency_us + self.host_us_per_byte * per_token * tokens)

        return hosting(self.stages[stage], work, copy_us, self.fragmentation_share)

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of the gradient of that sequence's keys and values, in all layers and for its whole length. It is allocated
        layer by layer in the backward of the last slice.
        """
        return self._whole_bytes(self.stages[stage].num_layers * self._gradient_of_layer(stage, work))

    def layer_bytes(self, stage: int, work: ChunkWork, level: str = "") -> IntColumn:
        """Bytes kept by one layer with the given recompute mode (empty: none), which backward frees after the layer."""
        return -self._whole_bytes(-self._layer_per_token(stage, work, level) * work.tokens)

    def layer_peak_bytes(self, stage: int, work: ChunkWork, level: str = "", *, apart: bool = False) -> LayerPeak:
        """Peak bytes of one layer while its backward runs: either at its beginning, with all activations of the forward or of
        recompute, or after its attention has made the gradient of keys and values (of the whole sequence, with the last slice)
        and the activations after attention have been freed.

        Args:
            apart: the weight gradient is split, so the backward keeps the tensors that it needs.
        """
        full, attended = self.stages[stage].peaks_per_token(level, apart)
        in_cache = self._in_cache(stage, work)
        gradient = np.where(work.last, self._gradient_of_layer(stage, work), 0.0)
        prefix = prefix_bytes(self.stages[stage], work)
        early, late = (full - in_cache) * work.tokens, (attended - in_cache) * work.tokens + gradient + prefix
        comes, made = (np.where(late > early, size, 0.0) for size in (gradient, prefix))
        return LayerPeak(*map(self._whole_bytes, (np.maximum(early, late), comes, made)))

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes that a backward frees before it reaches the layers."""
        return -self._whole_bytes(-self.stages[stage].head_bytes_per_token * work.tokens)

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held while a forward without backward (evaluation) runs: one layer's activations and the stage's extras."""
        costs = self.stages[stage]
        return self._whole_bytes((costs.layer_bytes_per_token + costs.extra_bytes_per_token) * work.tokens)

    def static_items(self, stage: int) -> dict[str, int]:
        """Bytes held throughout, by item. The workspace is counted as static too, because a pass of the last stage peaks while
        it computes the loss.
        """
        costs = self.stages[stage]
        return costs.static.items() | {LOSS_BLOCK: costs.workspace_bytes}

    def static_bytes(self, stage: int) -> int:
        """The sum of `static_items`."""
        return sum(self.static_items(stage).values())

    def pass_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """Bytes, by item, held only while a pass of a chunk runs, in addition to kept and recomputed activations."""
        return {WORKING: self._whole_bytes(self.stages[stage].working_bytes_per_token * work.tokens)}

    def message_bytes(self, work: ChunkWork) -> IntColumn:
        """Device memory of a chunk's activation, or its gradient, between stages."""
        return self._whole_bytes(self.message_bytes_per_token * work.tokens)

    def message_us(self, work: ChunkWork) -> TimeColumn:
        """Time of the message that carries a chunk's activation, or its gradient, between neighbouring stages."""
        return self.message_latency_us + self.message_us_per_byte * self.hidden_bytes_per_token * work.tokens

    def host_us(self, num_bytes: float) -> float:
        """Time to copy bytes from the device to the host, or back; infinite if there is no such link."""
        if math.isinf(self.host_us_per_byte):
            return math.inf
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    def _whole_bytes(self, amount: TimeColumn) -> IntColumn:
        return np.ceil(amount * (1.0 + self.fragmentation_share)).astype(np.int64)

    def to_json(self) -> str:
        """Return canonical JSON; `from_json` gives an equal object. A missing link to the host is written as null."""
        return _FORM.write(self)

    @staticmethod
    def from_json(text: str) -> PipelineCosts:
        """Read `to_json`; fields that older files lack keep their defaults. Raises `EppError` for any other text."""
        return _FORM.read(text, _costs)


def _costs(body: dict[str, Any]) -> PipelineCosts:
    if isinstance(stages := body.get("stages"), list):
        if any(isinstance(stage, dict) and stage.get(_IN_OLDER_FILES) for stage in stages):
            body = {"message_bytes_per_token": body.get("hidden_bytes_per_token")} | body
        body = body | {"stages": list(map(_told_apart, stages))}
    made = build(PipelineCosts, body, ignore_unknown=True)
    for number, stage in enumerate(made.stages):
        check_part(f"stages[{number}].weight", stage.weight, stage.backward)
        check_part(f"stages[{number}].extra_weight", stage.extra_weight, stage.extra_backward)
    return made


def _told_apart(stage: Any) -> Any:
    """Replace `static_bytes` of older files by `static`, with all bytes counted as weights."""
    if not isinstance(stage, dict):
        return stage
    rest = {name: value for name, value in stage.items() if name not in ("static_bytes", _IN_OLDER_FILES)}
    return rest | {"static": {"weights": stage["static_bytes"]}} if "static_bytes" in stage else rest
