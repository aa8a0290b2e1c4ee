"""Names of the items of a rank's memory, the static memory of a stage, and the allowances of a device."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_epp.plan.recompute import MODES

LAYERS = "layers that keep everything"
"""Activations of layers, from forward to backward."""
RECOMPUTE_MODE_ITEMS = {name: f"layers that recompute ({mode.name})" for name, mode in MODES.items()}
"""Activations of layers that keep less: their input alone (full), also core attention's output (selective), or all but those of
MLP and norms (mlp)."""
INPUTS = "stage inputs, embeddings"
"""Rows that the stage before has sent or the embedding has made."""
HEAD = "logits and loss"
"""Activations of the last stage's final norm, output layer and loss."""
STATES = "states of slices"
"""States, and keys and values of windows, that slices hand on; their size does not grow with the sequence."""
CACHE = "keys and values of slices"
"""Keys and values, or latents, of whole sequences, from the forward of the first slice to its backward."""
CACHE_GRADIENT = "gradients of keys and values"
"""Buffers for whole sequences, from the backward of the last slice to that of the first."""
KV_OFFLOAD = "KV offload buffers"
"""Keys and values on their way to and from host memory."""
TRANSIENT_KV_GRADIENT = "gradients of a prefix, as attention makes them"
"""Gradients of all keys and values that a slice reads, in one layer, before they are added up."""
RECOMPUTED = "layer being recomputed"
"""Activations that a second forward of one layer makes."""
WEIGHT_INPUTS = "kept for weight gradients"
"""Activations and gradients between a backward and its weight gradients, where these are split off."""
FRAGMENTATION = "fragmentation allowance"
"""Bytes that the allocator loses between its blocks: a share of all items that chunks allocate."""
LOSS_BLOCK = "block of the loss"
"""Logits of the tokens whose loss is computed at once, their gradients, and the output layer's weight gradient."""
WORKING = "layer that runs: gradients, workspace"
"""Tensors that live only while one layer, or the output layer, runs forward or backward."""
EXCHANGE = "buffer of the exchange with experts"
"""Memory that HybridEP holds for the largest chunk."""
MESSAGES = "messages in flight"
"""Activations and gradients that a rank sends or receives."""

DYNAMIC = (
    LAYERS,
    *RECOMPUTE_MODE_ITEMS.values(),
    INPUTS,
    HEAD,
    STATES,
    CACHE,
    CACHE_GRADIENT,
    KV_OFFLOAD,
    TRANSIENT_KV_GRADIENT,
    RECOMPUTED,
    WEIGHT_INPUTS,
    FRAGMENTATION,
)
"""Items that are allocated and freed with chunks, in the order in which reports list them."""

FRAGMENTATION_SHARE = 0.05
"""Default share of the bytes held by chunks on a GPU that is lost because a caching allocator's blocks exceed their tensors;
assumed, not measured."""
DEVICE_SHARE = 0.9
"""Share of a device's memory that plans may fill if no cap is given, so that libraries and communicators have room;
assumed, not measured."""
SETUP_MARGIN_BYTES = 1 << 30
"""Bytes of the memory free after set-up that plans leave unused, for kernels and workspaces allocated at their first use;
assumed, not measured."""
_CAP_STEP_BYTES = 1 << 28
"""Granularity of caps derived from free memory, so that runs with slightly different free memory mostly make equal plans."""
KEPT_CAP_SLACK_BYTES = 2 * _CAP_STEP_BYTES
"""Difference up to which a resumed run has the caps of the run before rather than those by its own free memory; within
`SETUP_MARGIN_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """Bytes that a stage holds throughout.

    Attributes:
        weights: as the model computes with them.
        gradients: the buffers in which gradients are accumulated and from which data-parallel ranks reduce them.
        optimizer: its states and its copy of the weights.
        buffers: new gradients of weights before they are added to their buffers, or placeholders for these.
        microbatches: a caller's microbatches on the device, taken from its iterators before an iteration or ahead of it.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    microbatches: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(parameters: float, state_bytes: float, weight_bytes: float = 2.0, gradient_bytes: float = 4.0) -> Static:
        """Static bytes of a number of parameters. The optimizer has what weight and gradient leave of `state_bytes`."""
        ends = [min(state_bytes, weight_bytes), min(state_bytes, weight_bytes + gradient_bytes), state_bytes]
        weights, both, everything = (int(parameters * end) for end in ends)
        return Static(weights=weights, gradients=both - weights, optimizer=everything - both)


NO_STATIC = Static()


def room_bytes(free_bytes: int, reserved_bytes: int) -> int:
    """Bytes that a rank may hold at most on a device after set-up, where torch's allocator has reserved some, in use or not."""
    return max(0, (free_bytes + reserved_bytes - SETUP_MARGIN_BYTES) // _CAP_STEP_BYTES * _CAP_STEP_BYTES)
