"""Shapes of layers with a recurrence in the place of attention: a gated delta net, or Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from megatron_epp.tools.formulas.layer_sizes import DeltaNet, StateSpace
from megatron_epp.tools.formulas.model_shape import ModelShape

RECURRENT = {"G": "delta", "M": "mamba"}
"""Fields with the sizes of recurrences, by the symbols of `ModelShape.mixers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape(ModelShape):
    """Properties of the layers of a `ModelShape` that have a recurrence, in which tokens have no pairs."""

    net: DeltaNet | StateSpace

    @classmethod
    def of(cls, shape: ModelShape, symbol: str) -> Self:
        own = {field.name: getattr(shape, field.name) for field in fields(ModelShape)}
        return cls(net=getattr(shape, RECURRENT[symbol]), **own)

    @property
    def attention_parameters(self) -> int:
        return self.net.parameters(self.hidden_size)

    @property
    def widest_projection(self) -> int:
        return self.hidden_size * self.net.projected_width

    @property
    def mixer_linear_width(self) -> int:
        return self.net.projected_width + self.net.value_width

    @property
    def attention_result_bytes_per_token(self) -> float:
        """0: where layers keep attention's output and recompute the rest, a recurrence runs again."""
        return 0.0

    @property
    def _attended_width(self) -> int:
        return self.net.exchanged_width + self.net.value_width

    @property
    def mixer_bytes_per_token(self) -> float:
        return self.net.kept_bytes(self.bytes_per_value) / self.ranks

    @property
    def state_bytes(self) -> float:
        """Bytes that a slice hands on: the state in fp32, and the last rows ahead of the convolution."""
        net = self.net
        return (4 * net.state_size + (net.filter_width - 1) * net.mixed_width * self.bytes_per_value) / self.ranks
