"""The cost model of the planners: time linear in tokens and attention pairs, memory in bytes per token.

The form is InfiniPipe's (section III): attention costs per pair, everything else per token, and every pass has a fixed part.
Besides, no pass takes less than the host needs to launch it (`work.Line`).
Coefficients come from `analytic_costs` or from measurement; either way they are these dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.kv_cache import KVOffloadCosts, kv_offload_costs, prefix_bytes
from megatron_epp.cost.memory import CACHE_GRADIENT, HEAD, INPUTS, LAYERS, LOSS_BLOCK, RECOMPUTE_MODE_ITEMS, WORKING
from megatron_epp.cost.serialize import Form
from megatron_epp.cost.stage import ATTENTION, NO_HALF, StageCosts, check_stage
from megatron_epp.cost.vocabulary import VocabularyShards
from megatron_epp.cost.work import NO_TIME, ChunkWork, IntColumn, LayerPeak, Line, ModeCosts, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, EppError, Op, Recompute
from megatron_epp.plan.operations import OperationRows
from megatron_epp.plan.recompute import MODES
from megatron_epp.plan.sizing import size_classes

_FORM = Form("cost profile", "megatron-epp/costs", 1)


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of every stage and of the messages between them.

    Methods take the number of a `stage`, the `work` of chunks, and where it matters their `recompute` or a layer's recompute
    mode (`mode`; empty for none). They return times in microseconds and sizes in bytes as columns ``[chunk]``, all sizes with
    the fragmentation share, except static ones. Recompute is linear in the number of layers of each mode; a mode whose costs
    are unknown raises `EppError`. A model of another form is a subclass.

    Attributes:
        name: of the profile; the plan records it.
        stages: one entry per stage, first to last.
        hidden_bytes_per_token: bytes that a message carries per padded token.
        message_bytes_per_token: device memory of a message per padded token; 0 if messages in flight are not counted.
        message_latency_us: fixed time of a message.
        message_us_per_byte: time per byte.
        host_latency_us: fixed time of a copy between device and host, either way.
        host_us_per_byte: time per byte; infinite if nothing can be offloaded.
        host_turns: consecutive pipeline ranks that share a link to the host and take turns on it (`hardware.divide`).
        offloadable_share: largest share of a chunk's activation bytes that may be offloaded.
        fragmentation_share: share of the bytes held by chunks that an allocator loses between its blocks. Included in every
            size except `static`.
        vocabulary: shards of the output layer, one on each pipeline rank; None if the last stage has the whole of it.
        context_exchange_us: time that exchanging a token in one layer takes a group of 1, 2, 4, ... context-parallel ranks, up
            to all of them, in a forward, and again in a backward; empty if unknown.
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
    vocabulary: VocabularyShards | None = None
    context_exchange_us: tuple[float, ...] = ()

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def num_halves(self) -> tuple[int, ...]:
        return tuple(stage.num_halves for stage in self.stages)

    @property
    def half_layers(self) -> tuple[int, ...]:
        """Number of half layers of each stage besides its layers, 0 or 1; empty if no stage has one."""
        found = tuple(halves % 2 for halves in self.num_halves)
        return found if any(found) else ()

    @property
    def num_cached_layers(self) -> tuple[int, ...]:
        return tuple(stage.num_cached_layers for stage in self.stages)

    @property
    def equal_stages(self) -> tuple[int, ...]:
        """Index of the first stage with the same costs, for each stage; often one for all but the first and last stages."""
        return tuple(map(self.stages.index, self.stages))

    @property
    def splits_weight(self) -> bool:
        """True if the weight gradient has a separate time, so that W can be a separate action."""
        return any(stage.stage_weight != NO_TIME for stage in self.stages)

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """Recompute modes whose costs are known for all stages, most recompute first."""
        return tuple(name for name in MODES if all(stage.mode(name) is not None for stage in self.stages))

    def forward_line(self, stage: int, trained_share: float = 1.0) -> Line:
        """Time of the forward as a line in tokens and pairs, by which chunks are balanced.

        `trained_share` is the share of trained tokens, which alone pass the last stage's output layer.
        """
        own = self.stages[stage]
        return own.stage_forward + self._not_trained(stage, own.extra_forward).scaled(trained_share - 1)

    def backward_line(self, stage: int, trained_share: float = 1.0) -> Line:
        """Time of the backward as such a line, with the weight gradient and without recompute."""
        own = self.stages[stage]
        return own.stage_backward + self._not_trained(stage, own.extra_backward).scaled(trained_share - 1)

    def forward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        own = self.stages[stage]
        return self._time_us(stage, own.stage_forward, own.extra_forward, work)

    def backward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the backward, with the weight gradient and without recompute."""
        own = self.stages[stage]
        return self._time_us(stage, own.stage_backward, own.extra_backward, work)

    def weight_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the weight gradients, a part of `backward_us`; if W is split off, B is shorter by `spared_us`."""
        own = self.stages[stage]
        return self._time_us(stage, own.stage_weight, own.extra_weight, work)

    def spared_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time by which B is shorter if W is split off: the time of W, or less where the host bounds B without it."""
        own = self.stages[stage]
        if not own.stage_backward.launch_us:
            return self.weight_us(stage, work)
        return self.backward_us(stage, work) - self._time_us(stage, own.stage_input, own.extra_input, work)

    def exchange_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of tensor parallelism's exchange in a forward, and as much in a backward, less what launching takes of both."""
        own = self.stages[stage]
        times_us = [own.stage_exchange.time_us(work.tokens, work.pairs)]
        backwards = (own.stage_backward, own.extra_backward), (own.stage_input, own.extra_input)
        for whole, extra in ((own.stage_forward, own.extra_forward), *backwards):
            if whole.launch_us:
                times_us.append(self._time_us(stage, whole, extra, work) - whole.launch_us)
        return np.asarray(np.minimum.reduce(times_us), dtype=np.float64)

    def _time_us(self, stage: int, whole: Line, extra: Line, work: ChunkWork) -> TimeColumn:
        """Time of a pass, less the time of its extras for tokens that do not pass the output layer of the last stage."""
        device_us: TimeColumn = whole.device_us(work.tokens, work.pairs)
        if work.trained is not None:
            device_us = device_us - self._not_trained(stage, extra).per_token_us * (work.tokens - work.trained)
        return np.asarray(whole.launched(device_us))

    def _not_trained(self, stage: int, extra: Line) -> Line:
        """Time that a token that is not trained does not take: what the last stage does besides its layers."""
        return Line(0.0, extra.per_token_us) if stage == len(self.stages) - 1 else NO_TIME

    def vocabulary_rows(self, op: Op, sites: Sequence[int], work: ChunkWork) -> OperationRows | None:
        """Times and bytes of an operation on vocabulary shards; None if there are none.

        Args:
            op: of `plan.vocabulary`.
            sites: the rank of each of its sites.
            work: of the chunks.
        """
        return None if self.vocabulary is None else self.vocabulary.rows(op, len(sites), work, self.fragmentation_share)

    def recompute_us(self, stage: int, work: ChunkWork, recompute: Recompute) -> TimeColumn:
        """Time that recompute adds to the backward. Each layer's part takes as long as launching it at least."""
        modes = ((count, self._known_mode(stage, name)) for name, count in recompute.by_mode())
        return sum((count * mode.again.time_us(work.tokens, work.pairs) for count, mode in modes), 0.0 * work.tokens)

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
        half = costs.half.bytes_per_token - costs.half.num_cached_layers * self._in_cache(stage, work)
        yield LAYERS, (costs.num_layers - recompute.num_layers) * self._layer_per_token(stage, work, "") + half
        for name, count in recompute.by_mode():
            yield RECOMPUTE_MODE_ITEMS[name], count * self._layer_per_token(stage, work, name)
        everywhere = np.ones(len(work.tokens))
        yield INPUTS, (costs.extra_bytes_per_token - costs.head_bytes_per_token) * everywhere
        yield HEAD, costs.head_bytes_per_token * everywhere

    def _layer_per_token(self, stage: int, work: ChunkWork, mode: str) -> TimeColumn:
        if mode == "":
            return self.stages[stage].layer_bytes_per_token - self._in_cache(stage, work)
        return self._known_mode(stage, mode).bytes_per_token - self._in_cache(stage, work) * MODES[mode].keeps_kv

    def _in_cache(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Bytes per token of a layer's kept activations that are in the sequence's key and value cache."""
        return np.where(work.sliced, self.stages[stage].kv_bytes_per_token, 0.0)

    def _gradient_of_layer(self, stage: int, work: ChunkWork) -> TimeColumn:
        return self.stages[stage].kv_gradient_per_token(work) * work.cache_tokens

    def _known_mode(self, stage: int, name: str) -> ModeCosts:
        if (mode := self.stages[stage].mode(name)) is None:
            raise EppError(f"the costs of stage {stage} do not know recompute mode {name!r}; measure them again")
        return mode

    def weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held from the end of B to the end of W if the two are split."""
        costs = self.stages[stage]
        per_token = costs.num_layers * costs.weight_bytes_per_token + costs.extra_weight_bytes_per_token
        per_token += costs.half.weight_bytes_per_token
        return self._whole_bytes(per_token * work.tokens)

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of one layer in `weight_bytes`. The bytes of all others are held when the backward reaches the layers."""
        return self._whole_bytes(self.stages[stage].weight_bytes_per_token * work.tokens)

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of keys and values, in all layers, of the whole sequence that a chunk holds a slice of, in buffers rounded up
        by `size_classes`.
        """
        costs = self.stages[stage]
        return self._whole_bytes(costs.num_cached_layers * costs.kv_bytes_per_token * size_classes(work.cache_tokens))

    def kv_offload_costs(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> KVOffloadCosts:
        """Time and memory of KV offload of slices.

        Args:
            stage: number of the stage.
            work: of the chunks.
            sharing: factor by which the link is slower because its rank also uses it for other copies. Other ranks that share
                the link stream slices of the same sequence at the same times.
        """

        def copy_us(per_token: float | TimeColumn, tokens: IntColumn) -> TimeColumn:
            return sharing * self.host_turns * (2 * self.host_latency_us + self.host_us_per_byte * per_token * tokens)

        return kv_offload_costs(self.stages[stage], work, copy_us, self.fragmentation_share)

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of the gradient of that sequence's keys and values, in all layers and for its whole length. It is allocated
        layer by layer in the backward of the last slice.
        """
        return self._whole_bytes(self.stages[stage].num_cached_layers * self._gradient_of_layer(stage, work))

    def layer_bytes(self, stage: int, work: ChunkWork, mode: str = "") -> IntColumn:
        """Bytes kept by one layer with the given recompute mode (empty: none), which backward frees after the layer."""
        return -self._whole_bytes(-self._layer_per_token(stage, work, mode) * work.tokens)

    def layer_peak_bytes(self, stage: int, work: ChunkWork, mode: str = "", *, split: bool = False) -> LayerPeak:
        """Peak bytes of one layer while its backward runs: either at its beginning, with all activations of the forward or of
        recompute, or after its attention has made the gradient of keys and values (of the whole sequence, with the last slice)
        and the activations after attention have been freed.

        Args:
            split: the weight gradient is split, so the backward keeps the tensors that it needs.
        """
        full, attended = self.stages[stage].peaks_per_token(mode, split)
        in_cache = self._in_cache(stage, work)
        gradient = np.where(work.last, self._gradient_of_layer(stage, work), 0.0)
        prefix = prefix_bytes(self.stages[stage], work)
        early, late = (full - in_cache) * work.tokens, (attended - in_cache) * work.tokens + gradient + prefix
        comes, made = (np.where(late > early, size, 0.0) for size in (gradient, prefix))
        return LayerPeak(*map(self._whole_bytes, (np.maximum(early, late), comes, made)))

    def num_cached_halves(self, stage: int) -> int:
        """Return 1 if the stage ends with an attention besides its layers, whose keys and values it caches; else 0."""
        return self.stages[stage].half.num_cached_layers

    def half_layer_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """Bytes by item that a backward holds for halves of layers from its start to its end, besides its layers' peaks.

        The gradient of keys and values of an attention at the stage's end comes first of all. Of an MLP at its start that
        counts as a layer with such an attention, the input stays until the end, in every recompute mode.
        """
        own = self.stages[stage]
        gradient = np.where(work.last, own.half.num_cached_layers * self._gradient_of_layer(stage, work), 0.0)
        of_mlp = own.recomputed_layer_bytes_per_token if own.first_mlp_bytes_per_token else 0.0
        return {CACHE_GRADIENT: self._whole_bytes(gradient), INPUTS: self._whole_bytes(of_mlp * work.tokens)}

    def half_peak_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes that the backward of an attention at the stage's end needs for a moment: gradients of a prefix, and if weight
        gradients are split off the gradient of its output, which is as large as its input.
        """
        own = self.stages[stage]
        if own.half.kind != ATTENTION:
            return np.zeros(len(work.tokens), dtype=np.int64)
        deferred = own.recomputed_layer_bytes_per_token if own.half.weight_bytes_per_token else 0.0
        return self._whole_bytes(deferred * work.tokens + prefix_bytes(own, work))

    def half_freed_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes that a backward frees when it has passed the attention at the stage's end, before it reaches the layers."""
        own = self.stages[stage]
        if own.half.kind != ATTENTION:
            return np.zeros(len(work.tokens), dtype=np.int64)
        return -self._whole_bytes(-(own.half.bytes_per_token - self._in_cache(stage, work)) * work.tokens)

    def first_mlp_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of the MLP at the stage's start, besides its input, if it counts as a layer with the attention at the stage's
        end and they keep everything: a backward comes to that attention first, and frees the MLP last.
        """
        own = self.stages[stage]
        return self._whole_bytes(max(0.0, own.first_mlp_bytes_per_token - own.recomputed_layer_bytes_per_token) * work.tokens)

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of `activation_bytes` that the last stage's backward frees before it reaches the layers."""
        return -self._whole_bytes(-self.stages[stage].head_bytes_per_token * work.tokens)

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held while a forward without backward (evaluation) runs: one layer's activations and the stage's extras."""
        costs = self.stages[stage]
        of_layer = costs.layer_bytes_per_token if costs.num_layers or costs.half == NO_HALF else costs.half.bytes_per_token
        return self._whole_bytes((of_layer + costs.extra_bytes_per_token) * work.tokens)

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
        """Time of one copy between device and host, either way, when it is the rank's turn; infinite if there is no link."""
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
        """Read `to_json`. Raises `EppError` for any other text."""
        return _FORM.read(PipelineCosts, text, _check)


def _check(costs: PipelineCosts) -> None:
    for number, stage in enumerate(costs.stages):
        check_stage(stage, f"stages[{number}]")
