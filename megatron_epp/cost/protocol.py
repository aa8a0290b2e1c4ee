"""Interface of a cost model to the planners. `PipelineCosts` implements it; models of another form may too."""

from __future__ import annotations

from typing import Protocol

from megatron_epp.cost.kv_offload import Hosting
from megatron_epp.cost.line import Line, TimeColumn
from megatron_epp.cost.work import ChunkWork, IntColumn, LayerPeak
from megatron_epp.plan import Recompute


class Costs(Protocol):
    """Times in microseconds and sizes in bytes, per stage, as columns with one entry per chunk of `work`.

    Recompute is linear in the number of layers of each mode: `recompute_us` and `activation_bytes` change by the same amount
    with each layer.
    """

    @property
    def name(self) -> str:
        """Name of the costs, which the plan records."""
        ...

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Transformer layers of every stage."""
        ...

    @property
    def splits_weight(self) -> bool:
        """True if the weight gradient has a separate time, so that W can be a separate action."""
        ...

    @property
    def recompute_levels(self) -> tuple[str, ...]:
        """Names of the modes of `Recompute` whose costs are known for all stages."""
        ...

    @property
    def offloadable_share(self) -> float:
        """Largest share of a chunk's activation bytes that may be offloaded, 0 to 1."""
        ...

    @property
    def host_turns(self) -> int:
        """Number of consecutive pipeline ranks, from the first on, that share a link to the host and take turns on it."""
        ...

    @property
    def alike(self) -> tuple[int, ...]:
        """Index of the first stage with the same costs, for each stage; often one for all but the first and last stages."""
        ...

    @property
    def fragmentation_share(self) -> float:
        """Share of the bytes held by chunks that an allocator loses; all sizes except static ones include it."""
        ...

    def forward_line(self, stage: int) -> Line:
        """Time of the forward as a line in tokens and pairs, by which chunks are balanced."""
        ...

    def backward_line(self, stage: int) -> Line:
        """Time of the backward as a line in tokens and pairs, with the weight gradient and without recompute."""
        ...

    def forward_us(self, stage: int, work: ChunkWork) -> TimeColumn: ...
    def backward_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the backward, with the weight gradient and without recompute."""
        ...

    def weight_us(self, stage: int, work: ChunkWork) -> TimeColumn:
        """Time of the weight gradient, a part of `backward_us`; if W is split off, B takes the rest."""
        ...

    def recompute_us(self, stage: int, work: ChunkWork, recompute: Recompute) -> TimeColumn:
        """Time that recompute adds to the backward."""
        ...

    def activation_bytes(self, stage: int, work: ChunkWork, recompute: Recompute) -> IntColumn:
        """Bytes kept from forward to backward, without the cache of a sliced sequence's keys and values."""
        ...

    def activation_items(self, stage: int, work: ChunkWork, recompute: Recompute) -> dict[str, IntColumn]:
        """Bytes of `activation_bytes` by item; their sum is `activation_bytes`."""
        ...

    def weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held from the end of B to the end of W if the two are split."""
        ...

    def layer_weight_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of one layer among `weight_bytes`; the remaining ones are held when the backward reaches the layers."""
        ...

    def cache_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of keys and values, in all layers, of the whole sequence that a chunk holds a slice of; 0 without a slice."""
        ...

    def gradient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of the gradient of these keys and values, allocated layer by layer in the backward of the last slice."""
        ...

    def layer_bytes(self, stage: int, work: ChunkWork, level: str = "") -> IntColumn:
        """Bytes of `activation_bytes` that one layer with the given recompute mode (empty: none) keeps."""
        ...

    def layer_peak_bytes(self, stage: int, work: ChunkWork, level: str = "", *, apart: bool = False) -> LayerPeak:
        """Peak bytes of such a layer while its backward runs; `apart` if it keeps the inputs of a split weight gradient."""
        ...

    def hosting(self, stage: int, work: ChunkWork, sharing: float = 1.0) -> Hosting:
        """Time and memory of KV offload of slices, over a link that is `sharing` times slower."""
        ...

    def head_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes of `activation_bytes` that the last stage's backward frees before it reaches the layers."""
        ...

    def transient_bytes(self, stage: int, work: ChunkWork) -> IntColumn:
        """Bytes held while a forward without backward (evaluation) runs."""
        ...

    def static_items(self, stage: int) -> dict[str, int]:
        """Bytes of `static_bytes` by item; their sum is `static_bytes`."""
        ...

    def static_bytes(self, stage: int) -> int:
        """Bytes held throughout: weights, gradients, optimizer."""
        ...

    def pass_items(self, stage: int, work: ChunkWork) -> dict[str, IntColumn]:
        """Bytes, by item, held only while a pass runs, in addition to kept and recomputed activations."""
        ...

    def message_bytes(self, work: ChunkWork) -> IntColumn:
        """Device memory of a chunk's activation, or its gradient, between stages; 0 if it is not counted."""
        ...

    def message_us(self, work: ChunkWork) -> TimeColumn:
        """Time of the message that carries a chunk's activation, or its gradient, between neighbouring stages."""
        ...

    def host_us(self, num_bytes: float) -> float:
        """Time of one copy between device and host, either way, when it is the rank's turn; infinite if there is no link."""
        ...
