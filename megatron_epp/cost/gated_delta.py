"""Shape of a layer with a gated delta net in the place of attention."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_epp.cost.model_shape import DeltaNet, Exchange, ModelShape

BLOCK_TOKENS = 64
"""Tokens between two states that flash-linear-attention's kernel computes; inside such a block it has products of pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape(ModelShape):
    """Properties of the layers of a `ModelShape` that have the gated delta net `delta`, in which tokens have no pairs."""

    @staticmethod
    def of(shape: ModelShape) -> DeltaShape:
        return DeltaShape(**{field.name: getattr(shape, field.name) for field in fields(ModelShape)})

    @property
    def net(self) -> DeltaNet:
        assert self.delta is not None
        return self.delta

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
    def mixer_bytes_per_token(self) -> float:
        """Bytes that a layer keeps of its projection, of the rows that the convolution reads, of heads that are normalized and
        then repeated for every head of values, and of the rule's output, its norm and what enters the last projection. In fp32
        there are decays and the input and output of their gate, and statistics of norms.
        """
        net = self.net
        copies = net.value_heads // net.key_heads
        repeated = 2 * net.key_width * copies if copies > 1 else 0
        values = net.projected_width + net.mixed_width + 2 * net.key_width + repeated + 4 * net.value_width
        values += net.value_heads * (BLOCK_TOKENS + 1)  # pairs of a block, and the strength of a write
        statistics = 4 * net.value_heads + 2 * net.key_heads
        return (values * self.bytes_per_value + 4 * statistics) / self.ranks

    @property
    def attention_result_bytes_per_token(self) -> float:
        """0: where layers keep attention's output and recompute the rest, a gated delta net runs again."""
        return 0.0

    @property
    def attention_exchanges(self) -> tuple[Exchange, ...]:
        width = self.net.mixed_width + self.net.value_width + 2 * self.net.value_heads
        heads = (1 - 1 / self.context_parallel) * (width * self.bytes_per_value / self.ranks)
        return self._reduced, Exchange(heads, self.context_parallel, self.tensor_parallel)

    @property
    def rule_products(self) -> float:
        """Multiplications of a token's forward of the rule: with the state, and with the tokens of its block."""
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

    @property
    def state_bytes(self) -> float:
        """Bytes that a slice hands on: the state in fp32, and the last rows ahead of the convolution."""
        net = self.net
        state = 4 * net.value_heads * net.key_channels * net.value_channels
        return (state + (net.filter_width - 1) * net.mixed_width * self.bytes_per_value) / self.ranks
