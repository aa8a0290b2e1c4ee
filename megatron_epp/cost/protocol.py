"""What a planner asks of a cost model. `PipelineCosts` answers it; a model with another form may too."""

from __future__ import annotations

from typing import Protocol

from megatron_epp.cost.kv_offload import Hosting
from megatron_epp.cost.line import Line, TimeColumn
from megatron_epp.cost.work import ChunkWork, IntColumn, LayerPeak
from megatron_epp.plan import Recompute


class Costs(Protocol):
    """Times in microseconds and sizes in bytes, per stage, as columns with one entry per chunk of `work`.

    Recompute is linear in the number of layers at each level: `recompute_us` and `activation_bytes` change by the same amount
    with each.
    """

    @property
    def name(self) -> str:
        """For the plan's record."""
        ...

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Transformer layers of every stage."""
        ...

    @property
    def splits_weight(self) -> bool:
        """The weight gradient has a time of its own, so that W can be an action of its own."""
        ...

    @property
    def recompute_levels(self) -> tuple[str, ...]:
        """Names of `Recompute` that the costs know of all stages."""
        ...

    @property
    def offloadable_share(self) -> float:
        """Most of a chunk's activation bytes that may leave the device, 0 to 1."""
        ...

    @property
    def host_turns(self) -> int:
        """Ranks of the pipeline in a row, from the first on, that share a link to the host and take turns on it."""
        ...

    @property
    def alike(self) -> tuple[int, ...]:
        """For every stage the first one with the same costs, often that of all but the first and the last."""
        ...

    @property
    def fragmentation_share(self) -> float:
        """Of what chunks hold, what an allocator loses: all sizes but static ones are larger by it."""
        ...

    def forward_line(self, stage: int) -> Line:
        """The forward as a line in tokens and pairs: what chunks are balanced by."""
        ...

    def backward_line(self, stage: int) -> Line:
        """The same of the backward, weight gradient included, recompute not."""
        ...

    def forward_us(self, stage: int, work: ChunkWork) -> TimeColumn: ...
    def backward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Weight gradient included, recompute not."""
        ...

    def weight_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """A part of `backward_us`: where W is split off, B takes the rest."""
        ...

    def recompute_us(self, stage: int, work: ChunkWork, recompute: Recompute) -> TimeColumn:
        """What recompute adds to the backward."""
        ...

    def activation_bytes(self, stage: int, work: ChunkWork, recompute: Recompute) -> IntColumn:
        """Kept from forward to backward, the cache of a sliced sequence's keys and values apart."""
        ...

    def activation_items(self, stage: int, work: ChunkWork, recompute: Recompute) -> dict[str, IntColumn]:
        """What `activation_bytes` are for: they are its sum."""
        ...

    def weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Held from the end of B to the end of W where the two are split."""
        ...

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Of these, one layer's; the others are there when the backward comes to the layers."""
        ...

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Keys and values, in all layers, of the whole sequence that a chunk holds a slice of; 0 where it holds none."""
        ...

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """The gradient of these keys and values; it comes with the backward of the last slice, each layer's with the layer."""
        ...

    def layer_bytes(self, stage: int, work: ChunkWork, level: str = "") -> IntColumn:
        """Of `activation_bytes`, what one layer keeps that recomputes at a level, or nothing."""
        ...

    def layer_peak_bytes(self, stage: int, work: ChunkWork, level: str = "", *, apart: bool = False) -> LayerPeak:
        """The most there is of such a layer while its backward runs; `apart` where that keeps what weight gradients need."""
        ...

    def hosting(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> Hosting:
        """What it takes to have keys and values of slices at the host; the link is `sharing` times slower."""
        ...

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Of `activation_bytes`, what the last stage's backward lets go before it reaches the layers."""
        ...

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """What a forward without backward (evaluation) holds while it runs."""
        ...

    def static_items(self, stage: int) -> dict[str, int]:
        """What `static_bytes` are for: they are its sum."""
        ...

    def static_bytes(self, stage: int) -> int:
        """Held throughout: weights, gradients, optimizer."""
        ...

    def pass_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """There only while a pass runs, beside what is kept and what recompute makes again."""
        ...

    def message_bytes(self, work: ChunkWork) -> IntColumn:
        """Device memory of a chunk's activation, or its gradient, between stages; 0 where it is not counted."""
        ...

    def message_us(self, work: ChunkWork) -> TimeColumn:
        """The message that carries a chunk's activation, or its gradient, between neighbouring stages."""
        ...

    def host_us(self, num_bytes: float) -> float:
        """One copy between device and host, either way, when it is the rank's turn; infinite where there is no link."""
        ...
