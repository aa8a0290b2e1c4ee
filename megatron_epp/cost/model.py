"""The cost model of the planners: time linear in tokens and attention pairs, memory in bytes per token.

The form is InfiniPipe's (section III): attention costs per pair, everything else per token, and every pass has a fixed part.
Besides, no pass takes less than the host needs to launch it (`work.LinearTime`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.blocks import CODEC, HEAD, PREDICTION, BlockCosts, StageCosts, check_stage
from megatron_epp.cost.kv_costs import KVOffloadCosts, kv_offload_costs
from megatron_epp.cost.memory import LAYERS, LOSS_BLOCK, RECOMPUTE_MODE_ITEMS, WORKING
from megatron_epp.cost.output_layer import VocabularyShards
from megatron_epp.cost.work import NO_TIME, ChunkWork, IntColumn, LayerPeak, LinearTime, ModeCosts, Sizes, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, EppError, Op, Recompute
from megatron_epp.plan.codec import FileFormat
from megatron_epp.plan.operations import OperationRows
from megatron_epp.plan.recompute import MODES
from megatron_epp.plan.sizing import size_classes

BACKWARD_COPIES = 4
"""Copies of keys and values in a row that take as long as what a backward does: it puts them there, and adds up gradients."""
_FORMAT = FileFormat("cost profile", "megatron-epp/costs", 2, CODEC)


@dataclass(frozen=True, slots=True)
class PipelineCosts:
    """Costs of every stage, first to last, and of the messages between them.

    Methods take the number of a `stage`, the `work` of chunks, and where it matters their `recompute` or a layer's recompute
    mode (`mode`; empty for none), or the number of one of unlike layers (`layer`; None for their mean). They return times in
    microseconds and sizes in bytes as columns ``[chunk]``, all sizes with the fragmentation share, except static ones. Times of
    recompute are linear in the number of layers of each mode, and bytes where layers are alike; a mode whose costs are unknown
    raises `EppError`. A model of another form is a subclass.
    """

    name: str  # of the profile; the plan records it
    stages: tuple[StageCosts, ...]
    hidden_bytes_per_token: float  # bytes that a message carries per padded token
    # message_latency_us, host_latency_us: fixed time of a message, and of a copy between device and host, either way
    message_latency_us: float = 0.0
    message_us_per_byte: float = 0.0
    host_latency_us: float = 0.0
    host_us_per_byte: float = math.inf  # infinite if nothing can be offloaded
    copy_us_per_byte: float = 0.0  # of a copy within a device, such as one that puts keys and values in a row
    host_turns: int = 1  # consecutive pipeline ranks that share a link to the host and take turns on it (`hardware.divide`)
    offloadable_share: float = 1.0  # largest share of a chunk's activation bytes that may be offloaded
    fragmentation_share: float = 0.0  # share of the bytes held by chunks that an allocator loses between its blocks
    message_bytes_per_token: float = 0.0  # device memory of a message per padded token; 0 if messages in flight are not counted
    # Shards of the output layer, one on each pipeline rank; None if the last stage has the whole of it
    vocabulary: VocabularyShards | None = None
    # Time that exchanging a token in one layer takes a group of 1, 2, 4, ... context-parallel ranks, up to all of them, in a
    # forward, and again in a backward; empty if unknown.
    context_exchange_us: tuple[float, ...] = ()
    # Of the buffer by which ranks that share experts exchange a chunk. It stays as large as the largest chunk of all these
    # ranks needs; 0 where its size does not follow from chunks.
    exchange_bytes_per_token: float = 0.0

    @property
    def num_layers(self) -> tuple[int, ...]:
        return tuple(stage.num_layers for stage in self.stages)

    @property
    def equal_stages(self) -> tuple[int, ...]:
        """Index of the first stage with the same costs, for each stage; often one for all but the first and last stages."""
        return tuple(map(self.stages.index, self.stages))

    def equal_stages_of(self, work: ChunkWork) -> tuple[int, ...]:
        """Return `equal_stages` for these chunks: the first stage is like no other where they have spans."""
        if work.span_work is None:
            return self.equal_stages
        return 0, *(1 + self.stages[1:].index(stage) for stage in self.stages[1:])

    def span_us(self, name: str) -> float:
        """Time of a unit of a span's work on the first stage in a pass: of a token in a layer, without attention."""
        layers = next((stage.layers for stage in self.stages if stage.num_layers), self.stages[0].layers)
        return {"forward": layers.forward, "weight": NO_TIME}.get(name, layers.backward).per_token_us

    @property
    def splits_weight(self) -> bool:
        """True if the weight gradient has a separate time, so that W can be a separate action."""
        return any(stage.line("weight") != NO_TIME for stage in self.stages)

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """Recompute modes whose costs are known for all stages, most recompute first."""
        return tuple(name for name in MODES if all(stage.layers.mode(name) is not None for stage in self.stages))

    def line(self, stage: int, name: str, trained_share: float = 1.0) -> LinearTime:
        """Time of a stage's pass (`StageCosts.line`), to balance chunks by. Only trained tokens pass the last output layer."""
        return self.stages[stage].line(name) + self._not_trained(stage, name).scaled(trained_share - 1)

    def forward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        return self._time_us(stage, "forward", work)

    def backward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the backward, with the weight gradient and without recompute."""
        return self._time_us(stage, "backward", work)

    def weight_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the weight gradients, a part of `backward_us`; if W is split off, B is shorter by `saved_by_split_us`."""
        return self._time_us(stage, "weight", work)

    def saved_by_split_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time by which B is shorter if W is split off: the time of W, or less where the host bounds B without it."""
        if not self.stages[stage].line("backward").launch_us:
            return self.weight_us(stage, work)
        return self.backward_us(stage, work) - self._time_us(stage, "split", work)

    def exchange_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of tensor parallelism's exchange in a forward, and as much in a backward, less what launching takes of both."""
        own = self.stages[stage]
        times_us = [own.exchange.time_us(work.tokens, work.pairs)]
        for name in ("forward", "backward", "split"):
            if launch_us := own.line(name).launch_us:
                times_us.append(self._time_us(stage, name, work) - launch_us)
        return np.asarray(np.minimum.reduce(times_us), dtype=np.float64)

    def _time_us(self, stage: int, name: str, work: ChunkWork) -> TimeColumn:
        whole = self.stages[stage].line(name)
        device_us: TimeColumn = whole.device_us(work.tokens, work.pairs, work.prefix_tokens)
        if work.trained is not None:
            device_us = device_us - self._not_trained(stage, name).per_token_us * (work.tokens - work.trained)
        if work.span_work is not None and stage == 0:
            device_us = device_us + self.span_us(name) * work.span_work
        if self.copy_us_per_byte and name != "weight":
            own, copies = self.stages[stage], 1 if name == "forward" else BACKWARD_COPIES
            copy_us = self.copy_us_per_byte * own.num_caches * own.kv.bytes_per_token
            device_us = device_us + copies * copy_us * work.gathered_tokens
        return np.asarray(whole.launched(device_us))

    def _not_trained(self, stage: int, name: str) -> LinearTime:
        is_last = stage == len(self.stages) - 1
        return LinearTime(0.0, self.stages[stage].line_of_ends(name).per_token_us) if is_last else NO_TIME

    def vocabulary_rows(self, op: Op, sites: Sequence[int], work: ChunkWork) -> OperationRows | None:
        """Times and bytes of an operation on vocabulary shards, with the rank of each of its sites; None without shards."""
        return None if self.vocabulary is None else self.vocabulary.rows(op, len(sites), work, self.fragmentation_share)

    def recompute_us(self, stage: int, work: ChunkWork, recompute: Recompute) -> TimeColumn:
        """Time that recompute adds to the backward. Each layer's part takes as long as launching it at least."""
        layers, sizes = self.stages[stage].layers, (work.tokens, work.pairs, work.prefix_tokens)
        modes = ((count, _known_mode(stage, layers, name)[0]) for name, count in recompute.by_mode())
        return sum((count * mode.again.time_us(*sizes) for count, mode in modes if mode is not None), 0.0 * work.tokens)

    def activation_bytes(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> IntColumn:
        """Bytes kept from forward to backward, without the cache of a sliced sequence's keys and values."""
        return sum(self.activation_items(stage, work, recompute).values(), np.zeros(len(work.tokens), dtype=np.int64))

    def activation_items(self, stage: int, work: ChunkWork, recompute: Recompute = NO_RECOMPUTE) -> dict[str, IntColumn]:
        """Bytes of `activation_bytes` by item. Their sum is rounded, not each of them."""
        own, per_item, more = self.stages[stage], {LAYERS: 0.0 * work.tokens}, 0.0 * work.tokens
        whole = dict(per_item)
        counts = [("", own.num_layers - recompute.num_layers), *recompute.by_mode()]
        modes = [((own.layers, name), count) for name, count in counts]
        if own.unlike:
            modes = [*Counter((layer, recompute.mode(number)) for number, layer in enumerate(own.unlike)).items()]
        for (layer, name), count in modes:
            item, known = RECOMPUTE_MODE_ITEMS.get(name, LAYERS), _known_mode(stage, layer, name)
            per_item[item] = per_item.get(item, 0.0) + count * layer.kept_per_token(work, *known)
            whole[item] = whole.get(item, 0.0) + count * known[1] * layer.kept_bytes(work)
        if work.span_kept is not None and stage == 0:  # no decision recomputes what encoders keep
            whole[LAYERS] = whole[LAYERS] + own.layers.bytes_per_token * work.span_kept
        outputs = work.outputs_per_token if stage == len(self.stages) - 1 else 1.0
        for block in (*own.ends, *own.inner):
            each = block.kept_per_token(work) * (outputs if block in own.ends else 1.0)
            per_item[block.item] = per_item.get(block.item, 0.0) + each
        items, before, per_token = {}, np.zeros(len(work.tokens), dtype=np.int64), more
        for name, each in per_item.items():
            per_token = per_token + each
            more = more + whole.get(name, 0.0) + sum(block.kept_bytes(work) for block in own.inner if block.item == name)
            after = self._whole_bytes(per_token * work.tokens + more)
            items[name], before = after - before, after
        return items

    def weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held from the end of B to the end of W if the two are split."""
        costs = self.stages[stage]
        ends, inner = (sum(block.weight_bytes_per_token for block in blocks) for blocks in (costs.ends, costs.inner))
        return self._whole_bytes((costs.num_layers * costs.layers.weight_bytes_per_token + ends + inner) * work.tokens)

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of one layer in `weight_bytes`. The bytes of all others are held when the backward reaches the layers."""
        return self._whole_bytes(self.stages[stage].layers.weight_bytes_per_token * work.tokens)

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of keys and values, in all layers, of the sequence that a chunk has a slice of, rounded by `size_classes`."""
        return self._cache_size(stage)(size_classes(work.cache_tokens))

    def opened_bytes(self, stage: int, work: ChunkWork) -> tuple[IntColumn, IntColumn]:
        """Bytes of keys and values that a chunk's forward makes room for, and of their gradient; its backward frees both."""
        first = work.opened_cache(self._cache_size(stage)), work.closed_gradients(self._gradient_size(stage, work))
        begun = (0 * first[0],) * 2 if work.begun is None else self.opened_bytes(stage, work.begun)
        return first[0] + begun[0], first[1] + begun[1]

    def released_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of keys and values that a forward frees where no backward follows."""
        return work.released_cache(self._cache_size(stage))

    def _cache_size(self, stage: int) -> Sizes:
        costs = self.stages[stage]
        return lambda tokens: self._whole_bytes(costs.num_caches * costs.kv.bytes_per_token * tokens)

    def _gradient_size(self, stage: int, work: ChunkWork) -> Sizes:
        own, per_token = self.stages[stage], self.stages[stage].kv.gradient_per_token(work)
        return lambda tokens: self._whole_bytes(own.num_caches * (per_token * tokens))

    def kv_offload_costs(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> KVOffloadCosts:
        """Time and memory of KV offload of slices.

        The link is slower by the factor `sharing`, since its rank also uses it for other copies. Other ranks that share it
        stream slices of the same sequence at the same times.
        """

        def copy_us(per_token: float | TimeColumn, tokens: IntColumn) -> TimeColumn:
            return sharing * self.host_turns * (2 * self.host_latency_us + self.host_us_per_byte * per_token * tokens)

        own = self.stages[stage]
        passes = own.layers.forward, own.layers.backward
        of_work = work.kv_offload_costs or kv_offload_costs
        return of_work(own.kv, own.num_caches, passes, work, copy_us, self.fragmentation_share)

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of the gradient of keys and values for which a backward makes room, layer by layer."""
        return work.opened_gradients(self._gradient_size(stage, work))

    def layer_bytes(self, stage: int, work: ChunkWork, mode: str = "", layer: int | None = None) -> IntColumn:
        """Bytes kept by one layer with the given recompute mode (empty: none), which backward frees after the layer."""
        own = self._layer(stage, layer)
        return self._freed_bytes(own.kept_per_token(work, *_known_mode(stage, own, mode)) * work.tokens)

    def layer_peak_bytes(
        self, stage: int, work: ChunkWork, mode: str = "", layer: int | None = None, *, split: bool = False
    ) -> LayerPeak:
        """Peak bytes of one layer while its backward runs: at its beginning, with all activations, or after its attention has
        made the gradient of keys and values (of the whole sequence, with the last slice) and the activations behind attention
        have been freed. A `split` backward keeps what the weight gradient needs.
        """
        return LayerPeak(*map(self._whole_bytes, self._layer(stage, layer).peak_bytes(work, mode, split)))

    def caches_of(self, stage: int, layer: int | None = None) -> tuple[int, int]:
        """Return the share that a layer has of a stage's cached keys and values: a number of caches, and how many there are."""
        own = self.stages[stage]
        if layer is None:
            return 1, max(1, own.num_cached_layers)
        return round(own.unlike[layer].num_cached), max(1, round(own.num_caches))

    def _layer(self, stage: int, layer: int | None) -> BlockCosts:
        own = self.stages[stage]
        return own.layers if layer is None else own.unlike[layer]

    def num_cached_inner(self, stage: int) -> int:
        """Number of the stage's attentions with a cache besides its layers': those of multi-token prediction."""
        return sum(block.count for block in self.stages[stage].inner if block.kv is not None)

    def inner_gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of gradients of keys and values of inner blocks, which a backward holds besides its layers' peaks."""
        own = self.stages[stage]
        every = sum((block.num_cached * block.kv_gradient_bytes(work) for block in own.inner), 0.0 * work.tokens)
        return self._whole_bytes(np.where(work.last, every, 0.0))

    def behind_peak_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes that the backward of a block behind the layers needs for a moment (`BlockCosts.passing_bytes`)."""
        passing = [block.passing_bytes(work) for block in self.stages[stage].behind]
        return self._whole_bytes(np.maximum.reduce([0.0 * work.tokens, *passing]))

    def gradients_not_yet_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of `inner_gradient_bytes` that are not there at the most that a backward holds before it reaches the
        layers: those of multi-token prediction, which come after logits are freed.
        """
        freed, less = self.head_bytes(stage, work), 0.0 * work.tokens
        for block in self.stages[stage].inner:
            if block.kind == PREDICTION:
                there = block.gradients_ahead_bytes(work, freed)
                less = less + np.where(work.last, block.num_cached * block.kv_gradient_bytes(work), 0.0) - there
        return self._freed_bytes(less)

    def behind_freed_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes that a backward frees when it has passed the inner blocks behind the layers, before it reaches these."""
        return self._freed_bytes(self._kept_bytes(self.stages[stage].behind, work))

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of `activation_bytes` that the last stage's backward frees before it reaches the layers."""
        return self._freed_bytes(self._kept_bytes([block for block in self.stages[stage].ends if block.kind == HEAD], work))

    def _kept_bytes(self, blocks: Iterable[BlockCosts], work: ChunkWork) -> TimeColumn:
        return sum((block.kept_per_token(work) * work.tokens + block.kept_bytes(work) for block in blocks), 0.0 * work.tokens)

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held while a forward without backward (evaluation) runs: one layer's activations and the stage's ends."""
        own = self.stages[stage]
        inner = [block.bytes_per_token / block.parts for block in own.inner]
        layers = [layer.bytes_per_token for layer in own.unlike or (own.layers,)]
        of_layer = max([*inner, *layers] if own.num_layers else inner, default=own.layers.bytes_per_token)
        more = sum((block.kept_bytes(work) for block in own.inner), 0.0 * work.tokens)
        outputs = work.outputs_per_token if stage == len(self.stages) - 1 else 1.0
        return self._whole_bytes((of_layer + own.ends_bytes_per_token * outputs) * work.tokens + more)

    def static_items(self, stage: int) -> dict[str, int]:
        """Bytes held throughout, by item, with the workspace: a pass of the last stage peaks while it computes the loss."""
        own = self.stages[stage]
        return own.static.items() | {LOSS_BLOCK: own.workspace_bytes}

    def static_bytes(self, stage: int) -> int:
        return sum(self.static_items(stage).values())

    def pass_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """Bytes, by item, held only while a pass of a chunk runs, in addition to kept and recomputed activations."""
        most = [block.running_bytes(work) for block in self.stages[stage].blocks]
        return {WORKING: self._whole_bytes(np.maximum.reduce([0.0 * work.tokens, *most]))}

    def exchange_bytes(self, work: ChunkWork) -> IntColumn:
        return self._whole_bytes(self.exchange_bytes_per_token * work.tokens)

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

    def _freed_bytes(self, amount: TimeColumn) -> IntColumn:
        """Return whole bytes rounded down, since no more than was kept may be freed."""
        return -self._whole_bytes(-amount)

    def to_json(self) -> str:
        """Return canonical JSON; `from_json` gives an equal object. A missing link to the host is written as null."""
        return _FORMAT.write(self)

    @staticmethod
    def from_json(text: str) -> PipelineCosts:
        """Read `to_json`. Raises `EppError` for any other text."""
        return _FORMAT.read(PipelineCosts, text, _check)


def _known_mode(stage: int, layer: BlockCosts, name: str) -> tuple[ModeCosts | None, bool]:
    """Return a mode's costs, None for a layer that keeps everything, and whether it keeps keys and values."""
    if not name:
        return None, True
    if (mode := layer.mode(name)) is None:
        raise EppError(f"the costs of stage {stage} do not know recompute mode {name!r}; measure them again")
    return mode, MODES[name].keeps_kv


def _check(costs: PipelineCosts) -> None:
    if not costs.stages:
        raise EppError("stages is empty: a pipeline has one stage at least")
    for number, stage in enumerate(costs.stages):
        check_stage(stage, f"stages[{number}]")


Costs = PipelineCosts
"""Costs as the planners know them."""
