"""The cost model a planner reads: straight lines in tokens and attention pairs for time, bytes per token for memory.

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
from megatron_epp.cost.memory import HEAD, INPUTS, LAYERS, LEVEL_ITEMS, LOSS_BLOCK, NO_STATIC, WORKING, Static
from megatron_epp.cost.prefix import prefix_bytes
from megatron_epp.cost.text import Form
from megatron_epp.cost.work import ChunkWork, IntColumn, LayerPeak
from megatron_epp.plan import LEVELS, NO_RECOMPUTE, EppError, Recompute
from megatron_epp.plan.kv_sums import MOST_ROUNDED
from megatron_epp.plan.size_class import size_classes

_FORM = Form("cost profile", "megatron-epp/costs", 1)
_IN_OLDER_FILES = "message_bytes_per_token"
"""Of a stage; what it counted is `PipelineCosts.message_bytes_per_token` now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Time and memory of one pipeline stage.

    Attributes:
        num_layers: transformer layers of the stage.
        forward: one layer's forward; recomputing a layer whole costs the same.
        backward: one layer's backward, weight gradient included, recompute not.
        weight: one layer's weight gradient, a part of `backward`: where W is an action of its own, B takes the rest.
        extra_forward: what the stage does besides its layers: embedding, or final norm, logits and loss.
        extra_backward: the same, backward.
        extra_weight: the same, weight gradient, a part of `extra_backward`.
        layer_bytes_per_token: kept from forward to backward by a layer that does not recompute, its K and V included.
        full_bytes_per_token: the most that it, or one that recomputes whole, keeps while its backward runs; None where that is
            all of these.
        attended_bytes_per_token: what is there when the backward of its attention has made the gradient of K and V;
            None where that is not known, and so may be all.
        recomputed_layer_bytes_per_token: kept by a layer that recomputes whole: its input.
        linear: a layer that recomputes all but core attention; None where that is not known.
        mlp: a layer that recomputes its MLP and norms; None where that is not known.
        extra_bytes_per_token: kept by the stage whatever its layers do: embedding output or received input, logits, loss.
        head_bytes_per_token: of these, what backward lets go before it reaches the layers: logits, loss.
        kv_bytes_per_token: K and V of one layer.
        kv_gradient_bytes_per_token: their gradient, while it is added up; None where it takes as much.
        many_kv_gradient_bytes_per_token: the same of sequences with more slices than `kv_sums.MOST_ROUNDED`; None where that
            is no other.
        kv_heads: heads of keys and values that a rank has inside attention.
        queries_per_key: query heads that share one of them.
        weight_bytes_per_token: what a layer's W still needs after its B: inputs and output gradients of the linear layers.
        apart_bytes_per_token: the most there is of a layer while a backward runs that keeps them; None where that is not known.
        apart_attended_bytes_per_token: the same, as `attended_bytes_per_token`.
        extra_weight_bytes_per_token: the same of the stage's extras.
        static: weights, gradients, optimizer state.
        workspace_bytes: there only while a pass runs, whatever its tokens: a block's logits.
        working_bytes_per_token: there only while a pass runs, of the layer it is at: gradients, workspace of its kernels.
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
        """Weights, gradients, optimizer state."""
        return self.static.num_bytes

    def level(self, name: str) -> Level | None:
        """A level of recompute by its name in `Recompute`; None where its costs are not known."""
        if name == "whole":
            return Level(self.forward, self.recomputed_layer_bytes_per_token)
        return self.linear if name == "linear" else self.mlp

    def kv_gradient_per_token(self, work: ChunkWork) -> TimeColumn:
        """Bytes of the gradient of one layer's keys and values while it is added up, of each chunk's sliced sequence."""
        few = self.kv_bytes_per_token if self.kv_gradient_bytes_per_token is None else self.kv_gradient_bytes_per_token
        many = few if self.many_kv_gradient_bytes_per_token is None else self.many_kv_gradient_bytes_per_token
        return np.where(work.num_slices > MOST_ROUNDED, many, few)

    def peaks_per_token(self, level: str, apart: bool) -> tuple[float, float]:
        """Bytes of one layer when its backward begins, and when its attention has made the gradient of K and V."""
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
        """All the stage does in a forward."""
        return self.forward.scaled(self.num_layers) + self.extra_forward

    @property
    def stage_backward(self) -> Line:
        """All the stage does in a backward without recompute."""
        return self.backward.scaled(self.num_layers) + self.extra_backward

    @property
    def stage_weight(self) -> Line:
        """All weight gradients of the stage, a part of `stage_backward`."""
        return self.weight.scaled(self.num_layers) + self.extra_weight


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of every stage and of the messages between them. Implements `megatron_epp.cost.protocol.Costs`.

    Attributes:
        name: of the profile; the plan records it.
        stages: one entry per stage, first to last.
        hidden_bytes_per_token: what a message carries per padded token.
        message_bytes_per_token: device memory of a message per padded token; 0 where messages in flight are not counted.
        message_latency_us: fixed time of a message.
        message_us_per_byte: time per byte.
        host_latency_us: fixed time of a copy between device and host, either way.
        host_us_per_byte: time per byte; infinite where nothing can be offloaded.
        host_turns: ranks of the pipeline in a row that share a link to the host and take turns on it (`host_link.divide`).
        offloadable_share: most of a chunk's activation bytes that may leave the device.
        fragmentation_share: of what chunks hold, what an allocator loses between its blocks. It is in every size but `static`.
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
        """For every stage the first one with the same costs."""
        return tuple(map(self.stages.index, self.stages))

    @property
    def splits_weight(self) -> bool:
        """The weight gradient has a time of its own, so that W can be an action of its own."""
        return any(stage.stage_weight != NO_TIME for stage in self.stages)

    @property
    def recompute_levels(self) -> tuple[str, ...]:
        """Levels of recompute whose costs are known of all stages, most recompute first."""
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
        """What recompute adds to the backward."""
        levels = self._levels(stage, recompute)
        return sum((count * level.again.time_us(work.tokens, work.pairs) for _, count, level in levels), 0.0 * work.tokens)

    def activation_bytes(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> IntColumn:
        """Kept from forward to backward, the cache of a sliced sequence's keys and values apart."""
        parts = self._kept_per_token(stage, work, recompute)
        return self._whole_bytes(sum((more for _, more in parts), 0.0 * work.tokens) * work.tokens)

    def activation_items(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> dict[str, IntColumn]:
        """What `activation_bytes` are for: they are its sum."""
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
        """Of what a layer keeps per token, what lies in the sequence's cache."""
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
        """Held from the end of B to the end of W where the two are split."""
        costs = self.stages[stage]
        per_token = costs.num_layers * costs.weight_bytes_per_token + costs.extra_weight_bytes_per_token
        return self._whole_bytes(per_token * work.tokens)

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Of these, one layer's."""
        return self._whole_bytes(self.stages[stage].weight_bytes_per_token * work.tokens)

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Keys and values of the whole sequence a chunk holds a slice of, all layers, in buffers of the sizes there are."""
        costs = self.stages[stage]
        return self._whole_bytes(costs.num_layers * costs.kv_bytes_per_token * size_classes(work.cache_tokens))

    def hosting(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> Hosting:
        """What it takes to have keys and values of slices at the host."""
        return hosting(self, stage, work, sharing)

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """The gradient of that sequence's keys and values, all layers. It comes with the backward of the last slice, layer by
        layer, as long as the sequence is.
        """
        return self._whole_bytes(self.stages[stage].num_layers * self._gradient_of_layer(stage, work))

    def layer_bytes(self, stage: int, work: ChunkWork, level: str = "") -> IntColumn:
        """What one layer keeps that recomputes at a level, or nothing: what a backward lets go when it has passed it."""
        return -self._whole_bytes(-self._layer_per_token(stage, work, level) * work.tokens)

    def layer_peak_bytes(self, stage: int, work: ChunkWork, level: str = "", *, apart: bool = False) -> LayerPeak:
        """The most there is of one layer while its backward runs: at its beginning, when everything is there that forward made
        or recompute has made again; or when its attention has made the gradient of keys and values (of the whole sequence, with
        the last slice) and what lies behind attention has gone.

        Args:
            apart: the backward keeps what weight gradients need.
        """
        full, attended = self.stages[stage].peaks_per_token(level, apart)
        in_cache = self._in_cache(stage, work)
        gradient = np.where(work.last, self._gradient_of_layer(stage, work), 0.0)
        prefix = prefix_bytes(self.stages[stage], work)
        early, late = (full - in_cache) * work.tokens, (attended - in_cache) * work.tokens + gradient + prefix
        comes, made = (np.where(late > early, size, 0.0) for size in (gradient, prefix))
        return LayerPeak(*map(self._whole_bytes, (np.maximum(early, late), comes, made)))

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """What a backward lets go before it reaches the layers."""
        return -self._whole_bytes(-self.stages[stage].head_bytes_per_token * work.tokens)

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """What a forward without backward (evaluation) holds while it runs: one layer's activations and the stage's extras."""
        costs = self.stages[stage]
        return self._whole_bytes((costs.layer_bytes_per_token + costs.extra_bytes_per_token) * work.tokens)

    def static_items(self, stage: int) -> dict[str, int]:
        """Held throughout, by item, and the workspace as if it were: a pass of the last stage holds most when it computes the
        loss.
        """
        costs = self.stages[stage]
        return costs.static.items() | {LOSS_BLOCK: costs.workspace_bytes}

    def static_bytes(self, stage: int) -> int:
        """The sum of `static_items`."""
        return sum(self.static_items(stage).values())

    def pass_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """What there is only while a pass of a chunk runs, beside what is kept and what recompute makes again."""
        return {WORKING: self._whole_bytes(self.stages[stage].working_bytes_per_token * work.tokens)}

    def message_bytes(self, work: ChunkWork) -> IntColumn:
        """Device memory of a chunk's activation, or its gradient, between stages."""
        return self._whole_bytes(self.message_bytes_per_token * work.tokens)

    def message_us(self, work: ChunkWork) -> TimeColumn:
        """Time of the message that carries a chunk's activation, or its gradient, between neighbouring stages."""
        return self.message_latency_us + self.message_us_per_byte * self.hidden_bytes_per_token * work.tokens

    def host_us(self, num_bytes: float) -> float:
        """Time to copy bytes from the device to the host, or back; infinite where there is no such link."""
        if math.isinf(self.host_us_per_byte):
            return math.inf
        return self.host_latency_us + self.host_us_per_byte * num_bytes

    def _whole_bytes(self, amount: TimeColumn) -> IntColumn:
        return np.ceil(amount * (1.0 + self.fragmentation_share)).astype(np.int64)

    def to_json(self) -> str:
        """Canonical JSON; `from_json` gives an equal object. No link to the host is written as null."""
        return _FORM.write(self)

    @staticmethod
    def from_json(text: str) -> PipelineCosts:
        """Read `to_json`; what older files lack keeps its default. Raises `EppError` when the text is something else."""
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
    """A stage with `static` in the place of `static_bytes`, which older files have: everything is among the weights."""
    if not isinstance(stage, dict):
        return stage
    rest = {name: value for name, value in stage.items() if name not in ("static_bytes", _IN_OLDER_FILES)}
    return rest | {"static": {"weights": stage["static_bytes"]}} if "static_bytes" in stage else rest
