"""What the bytes of a rank are for: names of the items, what a stage holds throughout, and what a device takes on top."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_epp.plan import LEVELS

LAYERS = "layers that keep everything"
LEVEL_ITEMS = {name: f"layers that recompute ({name})" for name in LEVELS}
INPUTS = "stage inputs, embeddings"
HEAD = "logits and loss"
CACHE = "keys and values of slices"
CACHE_GRADIENT = "gradients of keys and values"
HOSTED = "keys and values from the host"
PREFIX_GRADIENT = "gradients of a prefix, as attention makes them"
RECOMPUTED = "layer being recomputed"
WEIGHT_INPUTS = "kept for weight gradients"
FRAGMENTATION = "fragmentation allowance"
LOSS_BLOCK = "block of the loss"
WORKING = "layer that runs: gradients, workspace"
MESSAGES = "messages in flight"

DYNAMIC = (
    LAYERS,
    *LEVEL_ITEMS.values(),
    INPUTS,
    HEAD,
    CACHE,
    CACHE_GRADIENT,
    HOSTED,
    PREFIX_GRADIENT,
    RECOMPUTED,
    WEIGHT_INPUTS,
    FRAGMENTATION,
)
"""Items that come and go with chunks, in the order in which reports list them."""

FRAGMENTATION_SHARE = 0.05
"""Of what chunks hold, on a GPU, where nobody says: a caching allocator's blocks are larger than what lies in them."""
DEVICE_SHARE = 0.9
"""Of a device's memory, that plans may fill where nobody gives a cap: libraries and communicators take some of it too."""
SETUP_MARGIN_BYTES = 1 << 30
"""Of what is free after set-up, that plans leave: kernels are loaded, and workspaces made, when they are first used."""
_CAP_STEP_BYTES = 1 << 28
"""Caps of what is free are multiples of this, so that a resumed run, for which a little more or less is free, plans alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What a stage holds throughout, in bytes.

    Attributes:
        weights: as the model computes with them. In files from before they were told apart: everything.
        gradients: the buffers they are added up in, out of which data-parallel ranks reduce them.
        optimizer: its states and its copy of the weights.
        buffers: the largest weight's gradient before it is added to its buffer.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def of(parameters: float, state_bytes: float, weight_bytes: float = 2.0, gradient_bytes: float = 4.0) -> Static:
        """Of so many parameters.

        Args:
            parameters: on the rank.
            state_bytes: of each, in all.
            weight_bytes, gradient_bytes: of these; the rest is the optimizer's.
        """
        ends = [min(state_bytes, weight_bytes), min(state_bytes, weight_bytes + gradient_bytes), state_bytes]
        weights, both, everything = (int(parameters * end) for end in ends)
        return Static(weights=weights, gradients=both - weights, optimizer=everything - both)


NO_STATIC = Static()


def room_bytes(free_bytes: int, reserved_bytes: int) -> int:
    """The most that a rank may hold on a device that is set up.

    Args:
        free_bytes: that nothing and nobody has taken of the device.
        reserved_bytes: that torch's allocator has, in use or not.
    """
    room = free_bytes + reserved_bytes - SETUP_MARGIN_BYTES
    return max(0, room // _CAP_STEP_BYTES * _CAP_STEP_BYTES)
