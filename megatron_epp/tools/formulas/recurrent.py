"""Shapes of layers with a recurrence in the place of attention: a gated delta net, or Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from megatron_epp.tools.formulas.layer_sizes import DeltaNet, StateSpace
from megatron_epp.tools.formulas.model_shape import Exchange, ModelShape

BLOCK_TOKENS = 64
"""Tokens between two states that flash-linear-attention's kernel computes; inside such a block it has products of pairs."""
_SCAN_TOKENS = 128  # the same of mamba-ssm's kernel, as Megatron calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape(ModelShape):
    """Properties of the layers of a `ModelShape` that have a recurrence, in which tokens have no pairs."""

    @classmethod
    def of(cls, shape: ModelShape) -> Self:
        return cls(**{field.name: getattr(shape, field.name) for field in fields(ModelShape)})

    @property
    def net(self) -> DeltaNet | StateSpace:
        raise NotImplementedError

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
    def attention_exchanges(self) -> tuple[Exchange, ...]:
        width = self.net.exchanged_width + self.net.value_width
        heads = (1 - 1 / self.context_parallel) * (width * self.bytes_per_value / self.ranks)
        return self._reduced, Exchange(heads, self.context_parallel, self.tensor_parallel)

    @property
    def rule_products(self) -> float:
        """Multiplications of a token's forward of the recurrence: with the state, and with the tokens of its block."""
        raise NotImplementedError

    @property
    def rule_bytes_per_token(self) -> float:
        """Bytes that the kernels of the recurrence write for each other."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> float:
        """Bytes that a slice hands on: the state in fp32, and the last rows ahead of the convolution."""
        net = self.net
        return (4 * net.state_size + (net.filter_width - 1) * net.mixed_width * self.bytes_per_value) / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape(RecurrentShape):
    @property
    def net(self) -> DeltaNet:
        assert self.delta is not None
        return self.delta

    @property
    def mixer_bytes_per_token(self) -> float:
        """Bytes kept of the projection, the rows that the convolution reads, heads that are normalized and then repeated for
        every head of values, and the rule's output, its norm and what enters the last projection; in fp32 decays, their gate,
        statistics.
        """
        net = self.net
        copies = net.value_heads // net.key_heads
        repeated = 2 * net.key_width * copies if copies > 1 else 0
        values = net.projected_width + net.mixed_width + 2 * net.key_width + repeated + 4 * net.value_width
        values += net.value_heads * (BLOCK_TOKENS + 1)  # pairs of a block, and the strength of a write
        statistics = 4 * net.value_heads + 2 * net.key_heads
        return (values * self.bytes_per_value + 4 * statistics) / self.ranks

    @property
    def rule_products(self) -> float:
        net = self.net
        with_state = 3 * net.key_channels * net.value_channels
        in_block = BLOCK_TOKENS * (3 * net.key_channels + 2 * net.value_channels)
        return net.value_heads * (with_state + in_block) / self.ranks

    @property
    def rule_bytes_per_token(self) -> float:
        """Bytes that the kernels of the rule write for each other: three rows of a head, and a state of every block."""
        net = self.net
        values = net.key_channels + 2 * net.value_channels + net.key_channels * net.value_channels / BLOCK_TOKENS
        return net.value_heads * values * self.bytes_per_value / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceShape(RecurrentShape):
    @property
    def net(self) -> StateSpace:
        assert self.mamba is not None
        return self.mamba

    @property
    def mixer_bytes_per_token(self) -> float:
        """Bytes kept of the projection, the output ahead of the gate and behind it, and the last projection's input."""
        values = self.net.projected_width + 3 * self.net.value_width
        return (values * self.bytes_per_value + 4 * self.net.groups) / self.ranks

    @property
    def rule_products(self) -> float:
        """Multiplications of a token's forward: with the state, to write and to read, and with the tokens of its block."""
        net = self.net
        in_block = _SCAN_TOKENS * (net.value_width + net.groups * net.states)
        return (2 * net.state_size + in_block) / self.ranks

    @property
    def rule_bytes_per_token(self) -> float:
        """Bytes that the kernels write for each other: the convolution's output, steps and decays, products of pairs in fp32,
        and a state of every block, in fp32 and once more behind the others.
        """
        net = self.net
        states = net.state_size * (4 + self.bytes_per_value) / _SCAN_TOKENS
        values = net.mixed_width * self.bytes_per_value + 8 * net.heads + 4 * net.groups * _SCAN_TOKENS
        return (values + states) / self.ranks

    @property
    def gradient_bytes_per_token(self) -> float:
        """Bytes that the layer holds when its kernel's backward holds most, besides what it keeps, by the source of mamba-ssm.

        Gradients of the projection and of the residual stream; the convolution's output again, and its gradient; products of
        pairs, steps and decays in fp32; every block's state and its gradient, in fp32 and as values. Gradients of the kernel's
        output take the place of what the norm and the last projection have kept.
        """
        net = self.net
        values = net.projected_width + 2 * net.mixed_width
        states = 2 * net.state_size * (4 + self.bytes_per_value) / _SCAN_TOKENS
        num_bytes = values * self.bytes_per_value + 12 * net.heads + 4 * net.groups * _SCAN_TOKENS + states
        return num_bytes / self.ranks + self.hidden_bytes_per_token
