"""Sizes of a GPT, and the widths and parameters of a layer that follow from them on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from megatron_epp.cost.casts import Casts
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.flags import ALLTOALL
from megatron_epp.plan.sizing import shared_heads

PARTS = "*+GM-E"  # symbols of the parts of layers, see `LayerSizes.mixers`
BLOCK_TOKENS = 64
"""Tokens between two states that flash-linear-attention's kernel computes; inside such a block it has products of pairs."""
_SCAN_TOKENS = 128  # the same of mamba-ssm's kernel, as Megatron calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net. Groups of heads of values share a head of queries and keys."""

    key_heads: int
    key_channels: int
    value_heads: int
    value_channels: int
    filter_width: int  # tokens that its convolution sees

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_channels

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_channels

    @property
    def mixed_width(self) -> int:
        """Width of queries, keys and values, which the convolution reads."""
        return 2 * self.key_width + self.value_width

    @property
    def projected_width(self) -> int:
        """Width of these, of a gate of the output, and of the gates of every head."""
        return self.mixed_width + self.value_width + 2 * self.value_heads

    def parameters(self, hidden_size: int) -> int:
        return hidden_size * (self.projected_width + self.value_width) + self.filter_width * self.mixed_width

    @property
    def exchanged_width(self) -> int:
        """Width of what goes to the ranks of its heads: all but the gate of the output."""
        return self.projected_width - self.value_width

    @property
    def state_size(self) -> int:
        """Values of the states of all heads."""
        return self.value_heads * self.key_channels * self.value_channels

    def kept_bytes(self, bytes_per_value: int) -> float:
        """Bytes kept of a token: the projection, the rows that the convolution reads, heads that are normalized and then
        repeated for every head of values, and the rule's output, its norm and what enters the last projection; in fp32 decays,
        their gate, statistics.
        """
        copies = self.value_heads // self.key_heads
        repeated = 2 * self.key_width * copies if copies > 1 else 0
        values = self.projected_width + self.mixed_width + 2 * self.key_width + repeated + 4 * self.value_width
        values += self.value_heads * (BLOCK_TOKENS + 1)  # pairs of a block, and the strength of a write
        return values * bytes_per_value + 4 * (4 * self.value_heads + 2 * self.key_heads)

    @property
    def rule_products(self) -> int:
        """Multiplications of a token's forward of the rule: with the state, and with the tokens of its block."""
        with_state = 3 * self.key_channels * self.value_channels
        in_block = BLOCK_TOKENS * (3 * self.key_channels + 2 * self.value_channels)
        return self.value_heads * (with_state + in_block)

    def rule_bytes(self, bytes_per_value: int) -> float:
        """Bytes of a token that the rule's kernels write for each other: three rows of a head, and a state of every block."""
        values = self.key_channels + 2 * self.value_channels + self.key_channels * self.value_channels / BLOCK_TOKENS
        return self.value_heads * values * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Sizes of a Mamba-2 mixer. The heads of a group share what writes to their states and what reads them."""

    heads: int
    channels: int  # of a head
    groups: int
    states: int  # of a channel
    filter_width: int = 4  # tokens that its convolution sees

    @property
    def value_width(self) -> int:
        return self.heads * self.channels

    @property
    def mixed_width(self) -> int:
        """Width of what the convolution reads."""
        return self.value_width + 2 * self.groups * self.states

    @property
    def projected_width(self) -> int:
        """Width of this, of a gate of the output, and of the steps of every head."""
        return self.mixed_width + self.value_width + self.heads

    @property
    def exchanged_width(self) -> int:
        return self.projected_width

    @property
    def state_size(self) -> int:
        return self.value_width * self.states

    def parameters(self, hidden_size: int) -> int:
        return hidden_size * (self.projected_width + self.value_width) + self.filter_width * self.mixed_width

    def kept_bytes(self, bytes_per_value: int) -> float:
        """Bytes kept of a token: the projection, the output ahead of and behind the gate, and the last projection's input."""
        return (self.projected_width + 3 * self.value_width) * bytes_per_value + 4 * self.groups

    @property
    def rule_products(self) -> int:
        """Multiplications of a token's forward: with the state, to write and to read, and with the tokens of its block."""
        return 2 * self.state_size + _SCAN_TOKENS * (self.value_width + self.groups * self.states)

    def rule_bytes(self, bytes_per_value: int) -> float:
        """Bytes of a token that the kernels write for each other: the convolution's output, steps and decays, products of pairs
        in fp32, and a state of every block, in fp32 and once more behind the others.
        """
        states = self.state_size * (4 + bytes_per_value) / _SCAN_TOKENS
        return self.mixed_width * bytes_per_value + 8 * self.heads + 4 * self.groups * _SCAN_TOKENS + states

    def gradient_bytes(self, bytes_per_value: int) -> float:
        """Bytes of a token, besides what the layer keeps, when its kernel's backward holds most, by the source of mamba-ssm.

        Gradients of the projection; the convolution's output again, and its gradient; products of pairs, steps and decays in
        fp32; every block's state and its gradient, in fp32 and as values. Gradients of the kernel's output take the place of
        what the norm and the last projection have kept.
        """
        values = self.projected_width + 2 * self.mixed_width
        states = 2 * self.state_size * (4 + bytes_per_value) / _SCAN_TOKENS
        return values * bytes_per_value + 12 * self.heads + 4 * self.groups * _SCAN_TOKENS + states


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Shape of a GPT and how a layer is spread over ranks. Raises `EppError` if these cannot share the heads evenly."""

    num_layers: int  # of the whole model
    hidden_size: int  # width of the residual stream
    ffn_hidden_size: int  # width inside the MLP; of one expert where there are experts
    num_attention_heads: int  # query heads
    num_query_groups: int | None = None  # key and value heads; None means as many as query heads
    kv_channels: int | None = None  # width of a head; None means hidden_size / num_attention_heads
    value_channels: int | None = None  # width of a head of values and of attention's output; None means as wide
    # Width of the latent from which latent attention makes keys and values; None for other attention
    latent_rank: int | None = None
    query_rank: int | None = None  # width of the latent from which it makes queries; None for the hidden state itself
    rotated_channels: int = 0  # of a head of latent attention, those that turn with the position and are the same in all keys
    relays_latents: bool = False  # slices hand on the latents, of which attention makes keys and values, in the place of these
    window: int = 0  # tokens ahead of its own that a token sees in layers with a window
    window_share: float = 0.0  # share of the layers that have one; the others see all
    # What mixes tokens in each layer: ``*`` or ``+`` attention, ``G`` a gated delta net, ``M`` Mamba-2; one symbol if all
    # layers are alike. A layer of a hybrid model may be ``-`` an MLP or ``E`` experts. Properties are of those with
    # attention.
    mixers: str = "*"
    is_hybrid: bool = False  # a layer is such a part alone, and has no MLP or experts besides
    delta: DeltaNet | None = None  # gated delta net of the layers that have one (`model_shape.RecurrentShape`)
    mamba: StateSpace | None = None  # Mamba-2 mixer of the layers that have one
    vocab_size: int  # after padding
    gated_mlp: bool = True  # two input projections (SwiGLU) instead of one
    rotates: bool = False  # attention rotates queries and keys by their positions, without a fused kernel
    qk_norm: bool = False  # queries and keys pass a norm; of latent attention, the latents do
    norm_statistics: int = 1  # fp32 numbers that a norm keeps of what it normalizes (1 for RMSNorm, 2 for LayerNorm)
    output_gate: bool = False  # attention's output is multiplied by a gate of its own
    fuses_activation: bool = True  # the nonlinearity of a gated MLP is one kernel
    num_experts: int | None = None  # MLPs a router chooses from; None means one, without a router
    experts_per_token: int = 1  # how many of them a token passes (top-k). Experts are taken to be loaded evenly.
    shared_ffn_hidden_size: int = 0  # width inside the expert that all tokens pass; 0 without one
    shared_gate: bool = False  # the output of that expert is multiplied by a gate
    # Kept of a token by the router and by the permutation of copies, over all ranks that share the tokens
    router_bytes: float = 0.0
    # Of a probability that the router gives; ranks that share an expert add up its outputs in that type
    router_value_bytes: int = 2
    # Numbers, from 0, of layers that have one MLP in the place of experts; properties are of the others
    dense_layers: tuple[int, ...] = ()
    dense_ffn_hidden_size: int = 0  # width inside that MLP, or inside that of a hybrid model with experts
    predictions: int = 0  # depths of multi-token prediction
    bytes_per_value: int = 2  # of activations and messages (2 for bf16, 4 for fp32)
    casts: Casts | None = None  # of linear layers to FP8; None where they multiply in the type of the weights
    tensor_parallel: int = 1  # ranks that share the heads, the MLP and the vocabulary
    sequence_parallel: bool = False  # those ranks also share the tokens between the layers' matrix products
    context_parallel: int = 1  # ranks that share the tokens (the heads, inside attention)
    expert_parallel: int = 1  # ranks that share the experts
    # Ranks that share an expert; None means as many as `tensor_parallel`, as in Megatron
    expert_tensor_parallel: int | None = None
    expert_dispatcher: str = ALLTOALL  # one of `DISPATCHERS`
    # expert_groups, chosen_groups: of equal groups of experts, those in which a token's experts are
    expert_groups: int = 1
    chosen_groups: int = 1
    loss_block_tokens: int = 0  # of a block of the loss; 0 where all logits of a chunk are there at once

    def __post_init__(self) -> None:
        tensor, context = self.tensor_parallel, self.context_parallel
        if self.num_attention_heads % tensor:
            text = f"{self.num_attention_heads} attention heads cannot be shared evenly by {tensor} tensor-parallel ranks"
            raise EppError(text, Remedy("change", "tensor_parallel"))
        heads = [] if self.delta is None else [(self.delta.key_heads, "key heads of gated delta nets")]
        heads += [] if self.mamba is None else [(self.mamba.heads, "heads of Mamba-2")]
        for count, what in heads:
            if count % self.ranks:
                text = f"{count} {what} cannot be shared evenly by {tensor} tensor-parallel x {context} context-parallel ranks"
                raise EppError(text, Remedy("change", "tensor_parallel"), Remedy("change", "context_parallel"))

    @property
    def dense(self) -> Self | None:
        """Shape of a layer without experts of a model that has layers of both kinds; None if all layers are alike."""
        return self.with_one_mlp if self.dense_layers else None

    @property
    def with_one_mlp(self) -> Self:
        """Shape of a layer with an MLP in the place of experts."""
        if self.num_experts is None:
            return self
        plain = replace(self, num_experts=None, experts_per_token=1, router_bytes=0.0, dense_layers=())
        return replace(plain, ffn_hidden_size=self.dense_ffn_hidden_size, shared_ffn_hidden_size=0, shared_gate=False)

    def share_of(self, symbols: str) -> float:
        """Share of the layers that have one of some `mixers`."""
        return sum(map(self.mixers.count, symbols)) / len(self.mixers)

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_width

    @property
    def output_width(self) -> int:
        return self.num_attention_heads * self.value_head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of values that are as wide."""
        return (self.num_query_groups or self.num_attention_heads) * self.head_width

    @property
    def _latents(self) -> int:
        """Width of the latents of keys and values, and of queries."""
        return (self.latent_rank or 0) + (self.query_rank or 0)

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_head_width(self) -> int:
        return self.value_channels or self.head_width

    @property
    def cached_width(self) -> int:
        """Width of what attention caches of a token over tensor-parallel ranks; several hold the same heads, all a latent."""
        if self.relays_latents:
            return (self.rotated_channels + (self.latent_rank or 0)) * self.tensor_parallel
        return (self.head_width + self.value_head_width) * self.kv_heads_per_tensor_rank * self.tensor_parallel

    @property
    def ranks(self) -> int:
        """Number of ranks that share the work of one layer on one chunk."""
        return self.tensor_parallel * self.context_parallel

    @property
    def kv_heads_per_tensor_rank(self) -> int:
        return 1 if self.relays_latents else max(1, (self.num_query_groups or self.num_attention_heads) // self.tensor_parallel)

    @property
    def _shared_heads(self) -> tuple[int, int]:
        """Heads of keys and values of a tensor-parallel rank, and query heads of each, zeros among them (`shared_heads`)."""
        keys = self.kv_heads_per_tensor_rank
        return shared_heads(keys, max(1, self.num_attention_heads // (self.tensor_parallel * keys)), self.context_parallel)

    @property
    def heads_on_rank(self) -> int:
        """Number of query heads that a rank has inside attention, where context-parallel ranks may have some of zeros."""
        return math.prod(self._shared_heads) // self.context_parallel

    @property
    def kv_heads_on_rank(self) -> int:
        """Number of whole heads of keys and values on a rank inside attention: context-parallel ranks may share them."""
        return math.lcm(self._shared_heads[0], self.context_parallel) // self.context_parallel

    @property
    def attended_query_width(self) -> int:
        """Width of the queries inside attention, over all ranks; the other `attended` widths likewise."""
        return self.heads_on_rank * self.ranks * self.head_width

    @property
    def attended_output_width(self) -> int:
        return self.heads_on_rank * self.ranks * self.value_head_width

    @property
    def attended_cached_width(self) -> int:
        return self.cached_width // self.kv_heads_per_tensor_rank * self.kv_heads_on_rank * self.context_parallel

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that share a head of keys and values on a rank; 1 with latents, of which each makes its own."""
        return 1 if self.relays_latents else max(1, self.heads_on_rank // self.kv_heads_on_rank)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP, or of one expert."""
        return self._gates * self.hidden_size * self.ffn_hidden_size

    @property
    def attention_parameters(self) -> int:
        if self.latent_rank is None:
            return self.hidden_size * ((2 + self.output_gate) * self.query_width + 2 * self.kv_width)
        into_queries = self.hidden_size * self.query_width
        if self.query_rank is not None:
            into_queries = self.query_rank * (self.hidden_size + self.query_width)
        into_latents = self.hidden_size * (self.latent_rank + self.rotated_channels)
        return into_queries + into_latents + self.expansion_parameters + self.output_width * self.hidden_size

    @property
    def expanded_heads(self) -> int:
        """Number of heads on a rank for which attention makes keys and values of latents; 0 if keys and values are relayed."""
        return self.heads_on_rank if self.relays_latents else 0

    @property
    def expanded_bytes_per_token(self) -> float:
        return float(self.expanded_heads * (self.head_width + self.value_head_width) * self.bytes_per_value)

    @property
    def expansion_parameters(self) -> int:
        """Parameters that make keys and values of a latent."""
        unrotated = self.num_attention_heads * (self.head_width - self.rotated_channels)
        return (self.latent_rank or 0) * (unrotated + self.output_width)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, all experts included."""
        return self._parameters_with(self.num_experts or 1)

    @property
    def parameters_per_token(self) -> int:
        """Parameters of a layer that one token uses."""
        return self._parameters_with(1 if self.num_experts is None else self.experts_per_token)

    def _parameters_with(self, num_mlps: int) -> int:
        """Parameters of attention, of the router if there is one, and of so many MLPs or experts."""
        more = self.hidden_size * (self.num_experts or 0) + self._gates * self.hidden_size * self.shared_ffn_hidden_size
        return self.attention_parameters + more + num_mlps * self.mlp_parameters

    @property
    def _gates(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated_mlp else 2

    @property
    def layer_parameters_on_rank(self) -> float:
        experts = (self.num_experts or 0) * self.mlp_parameters
        return (self.layer_parameters - experts) / self.tensor_parallel + self.expert_parameters_on_rank

    @property
    def expert_parameters_on_rank(self) -> float:
        return (self.num_experts or 0) * self.mlp_parameters / (self.expert_parallel * self.ranks_of_an_expert)

    @property
    def ranks_of_an_expert(self) -> int:
        """Number of ranks that share an expert. They are neighbours; those with other experts follow."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def vocabulary_parameters(self) -> int:
        """Parameters of the embedding, which is also the number of the output layer if it is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def largest_layer_weight(self) -> float:
        """Parameters of the largest weight matrix of a layer on one rank: into the MLP or an expert, or into attention."""
        into_mlp = self.hidden_size * self.ffn_hidden_size * (self._gates - 1)
        sharing = self.ranks_of_an_expert if self.num_experts else self.tensor_parallel
        return max(into_mlp / sharing, self.widest_projection / self.tensor_parallel)

    @property
    def widest_projection(self) -> int:
        """Parameters of the largest weight matrix of attention."""
        if self.latent_rank is not None:
            return max((self.query_rank or self.hidden_size) * self.query_width, self.expansion_parameters)
        return self.hidden_size * (self.query_width + 2 * self.kv_width)
