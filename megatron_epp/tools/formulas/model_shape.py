"""Shape of a GPT, and the parameters and bytes per layer and token that follow from it on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_epp.cost.casts import Casts
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.flags import ALLTOALL
from megatron_epp.plan.sizing import shared_heads

PARTS = "*+GM-E"
"""Symbols of the parts of layers, see `ModelShape.mixers`."""


class Exchange(NamedTuple):
    """Exchange of a rank with a group of ranks, per token of a chunk, in a layer's forward and again in its backward."""

    num_bytes: float  # that it sends to the others, where every copy is sent by itself
    ranks: int  # of the group
    spacing: int  # from one rank of the group to the next, in devices
    # of a token, each to a rank of the group; more than 0 if a node, and a rank, gets one for all of its experts
    copies: int = 0
    # groups, chosen: a token's experts are in `chosen` of `groups` equal groups of neighbouring experts
    groups: int = 1
    chosen: int = 1

    def split(self, devices_per_node: float) -> tuple[float, float]:
        """Bytes that stay inside nodes of so many devices, and bytes that leave them."""
        inside = max(1.0, min(self.ranks, devices_per_node / self.spacing))
        if self.ranks == 1:
            return 0.0, 0.0
        if not self.copies:
            abroad = self.num_bytes * (self.ranks - inside) / (self.ranks - 1)
            return self.num_bytes - abroad, abroad
        nodes = self.ranks / inside
        one_copy = self.num_bytes / (self.copies * (1 - 1 / self.ranks))
        to_ranks, to_nodes = (one_copy * self._reached(count) for count in (self.ranks, nodes))
        return to_ranks * (1 - 1 / inside), to_nodes * (1 - 1 / nodes)

    def _reached(self, parts: float) -> float:
        """Mean number of equal parts of the group that have an expert of a token, whose experts are drawn at random."""
        parts = min(parts, self.chosen * max(1.0, parts / self.groups))
        return parts * (1 - (1 - 1 / parts) ** self.copies)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a GPT and how one layer is spread over ranks, of layers with attention and experts if there are others too.

    Raises `EppError` if tensor-parallel ranks cannot share the heads evenly, or all ranks those of a recurrence.
    """

    num_layers: int  # of the whole model
    hidden_size: int  # width of the residual stream
    ffn_hidden_size: int  # width inside the MLP; of one expert where there are experts
    num_attention_heads: int  # query heads
    num_query_groups: int | None = None  # key and value heads; None means as many as query heads
    kv_channels: int | None = None  # width of a head; None means hidden_size / num_attention_heads
    value_channels: int | None = None  # width of a head of values and of attention's output; None means as wide
    # width of the latent from which latent attention makes keys and values; None for other attention
    latent_rank: int | None = None
    query_rank: int | None = None  # width of the latent from which it makes queries; None for the hidden state itself
    rotated_channels: int = 0  # of a head of latent attention, those that turn with the position and are the same in all keys
    relays_latents: bool = False  # slices hand on the latents, of which attention makes keys and values, in the place of these
    window: int = 0  # tokens ahead of its own that a token sees in layers with a window
    window_share: float = 0.0  # share of the layers that have one; the others see all
    # what mixes tokens in each layer: ``*`` or ``+`` attention, ``G`` a gated delta net, ``M`` Mamba-2; one symbol if all
    # layers are alike. A layer of a hybrid model may be ``-`` an MLP or ``E`` experts. Properties are of those with
    # attention.
    mixers: str = "*"
    is_hybrid: bool = False  # a layer is such a part alone, and has no MLP or experts besides
    delta: DeltaNet | None = None  # gated delta net of the layers that have one (`recurrent.DeltaShape`)
    mamba: StateSpace | None = None  # Mamba-2 mixer of the layers that have one (`recurrent.StateSpaceShape`)
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
    # kept of a token by the router and by the permutation of copies, over all ranks that share the tokens
    router_bytes: float = 0.0
    # of a probability that the router gives; ranks that share an expert add up its outputs in that type
    router_value_bytes: int = 2
    # numbers, from 0, of layers that have one MLP in the place of experts; properties are of the others
    dense_layers: tuple[int, ...] = ()
    dense_ffn_hidden_size: int = 0  # width inside that MLP, or inside that of a hybrid model with experts
    predictions: int = 0  # depths of multi-token prediction
    bytes_per_value: int = 2  # of activations and messages (2 for bf16, 4 for fp32)
    casts: Casts | None = None  # of linear layers to FP8; None where they multiply in the type of the weights
    tensor_parallel: int = 1  # ranks that share the heads, the MLP and the vocabulary
    sequence_parallel: bool = False  # those ranks also share the tokens between the layers' matrix products
    context_parallel: int = 1  # ranks that share the tokens (the heads, inside attention)
    expert_parallel: int = 1  # ranks that share the experts
    # ranks that share an expert; None means as many as `tensor_parallel`, as in Megatron
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
    def dense(self) -> ModelShape | None:
        """Shape of a layer without experts of a model that has layers of both kinds; None if all layers are alike."""
        return self.with_one_mlp if self.dense_layers else None

    @property
    def with_one_mlp(self) -> ModelShape:
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
    def _down_width(self) -> int:
        """Width of what the hidden state is projected to: latents, before their norms, and the keys' part that turns."""
        return 0 if self.latent_rank is None else self._latents + self.rotated_channels

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_head_width(self) -> int:
        return self.value_channels or self.head_width

    @property
    def cached_width(self) -> int:
        """Width of what attention caches of a token, keys and values, over tensor-parallel ranks, of which several may hold the
        same head where there are more of them; all hold the same latent.
        """
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
        queries = max(1, self.num_attention_heads // (self.tensor_parallel * keys))
        return shared_heads(keys, queries, self.context_parallel)

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
        into_mlp = self.hidden_size * self.ffn_hidden_size * (2 if self.gated_mlp else 1)
        sharing = self.ranks_of_an_expert if self.num_experts else self.tensor_parallel
        return max(into_mlp / sharing, self.widest_projection / self.tensor_parallel)

    @property
    def widest_projection(self) -> int:
        """Parameters of the largest weight matrix of attention."""
        if self.latent_rank is not None:
            return max((self.query_rank or self.hidden_size) * self.query_width, self.expansion_parameters)
        return self.hidden_size * (self.query_width + 2 * self.kv_width)

    @property
    def hidden_bytes_per_token(self) -> float:
        """Bytes of the residual stream of one token on one rank."""
        shared = self.tensor_parallel if self.sequence_parallel else 1
        return self.hidden_size * self.bytes_per_value / (shared * self.context_parallel)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.attended_cached_width * self.bytes_per_value / self.ranks

    @property
    def mixer_linear_width(self) -> int:
        """Width of outputs of attention's linear layers, and of inputs that are not the hidden state."""
        return self.query_width + self.output_width + self.cached_width + self._latents + self._down_width

    @property
    def _attended_width(self) -> int:
        """Width of queries, output, keys and values inside attention, over all ranks."""
        return self.attended_query_width + self.attended_output_width + self.attended_cached_width

    @property
    def _mlp_width(self) -> int:
        """Width of the input and output of the nonlinearity of the MLP, or of a token's experts."""
        return self._gates * (self.ffn_hidden_size * self.experts_per_token + self.shared_ffn_hidden_size)

    @property
    def _attention_rest_bytes_per_token(self) -> float:
        """Bytes that attention keeps besides `_attended_width` and latents: what its norms read, statistics, angles, a gate.

        A norm of residual width counts with the layer. Keys of one head are on several ranks where these are more than the
        heads.
        """
        values, statistics = 0, 0
        key_heads = self.kv_heads_per_tensor_rank * self.tensor_parallel
        if self.qk_norm and self.latent_rank is not None:
            values += self._latents
            statistics += 1 + (self.query_rank is not None)
        elif self.qk_norm:
            values += self.query_width + key_heads * self.head_width
            statistics += self.num_attention_heads + key_heads
        if self.rotates:  # a cosine and a sine of queries, and again of keys, on each tensor-parallel rank
            values += 4 * (self.rotated_channels or self.head_width) * self.tensor_parallel
        if self.output_gate:
            values += self.output_width  # what enters the projection
            statistics += self.output_width  # the gate
        return (values * self.bytes_per_value + 4 * self.norm_statistics * statistics) / self.ranks

    @property
    def attention_result_bytes_per_token(self) -> float:
        """Bytes of core attention's output, and of one fp32 number per head (log-sum-exp), which its backward needs."""
        return self.attended_output_width * self.bytes_per_value / self.ranks + 4 * self.heads_on_rank

    @property
    def mlp_bytes_per_token(self) -> float:
        """Bytes kept by the MLP, or by the router and a token's experts: input and output of the nonlinearity, and the inputs
        of experts. Their outputs are not kept, since the router's weights are applied to the nonlinearity's.
        """
        inside = self._mlp_width
        if self.gated_mlp and not self.fuses_activation:  # both factors, and where experts are weighted the product
            inside += (2 + (self.num_experts is not None)) * self.ffn_hidden_size * self.experts_per_token
            inside += 2 * self.shared_ffn_hidden_size
        if not self.gated_mlp and self.num_experts is not None:  # the nonlinearity's output before it is weighted
            inside += self.ffn_hidden_size * self.experts_per_token
        rest = self.routed_bytes_per_token / 2 + self.router_bytes / self.ranks
        if self.shared_gate:
            rest += self.hidden_bytes_per_token + self.bytes_per_value / self.ranks
        return inside * self.bytes_per_value / self.ranks + rest

    @property
    def mlp_parameters_per_token(self) -> int:
        """Parameters of the MLP, or of the router and a token's experts."""
        return self.parameters_per_token - self.attention_parameters

    @property
    def routed_bytes_per_token(self) -> float:
        """Bytes of a token's copies that are the inputs and outputs of its experts, which all ranks of an expert have."""
        return self._copied_bytes_per_token * self.ranks_of_an_expert

    @property
    def _copied_bytes_per_token(self) -> float:
        """Bytes of a token's copies on their way to and from their experts."""
        if self.num_experts is None:
            return 0.0
        return 2 * self.experts_per_token * self.hidden_size * self.bytes_per_value / self.ranks

    @property
    def dispatched_bytes_per_token(self) -> float:
        """Bytes of a token's copies that a forward holds until its experts' outputs are back, besides those that it keeps.

        Megatron's functions hold copies as they leave and as they arrive, and experts' outputs in two orders. Ranks that share
        an expert have all of its outputs, and cast them to the type in which they add them up. Dispatchers with kernels of
        their own make no copies to send.
        """
        copies, outputs = self._copied_bytes_per_token / 2, self.routed_bytes_per_token / 2
        if self.expert_dispatcher != ALLTOALL:
            return 3 * outputs
        held = (2 if self.expert_parallel > 1 else 1) * copies + 2 * outputs
        if self.ranks_of_an_expert == 1:
            return held
        width = self.router_value_bytes / self.bytes_per_value
        return held + width * copies + (width * outputs if width > 1 else 0.0)

    @property
    def layer_bytes_per_token(self) -> float:
        """Bytes kept by a layer: four tensors of residual width (both norms), attention's and the MLP's, no masks of dropout.

        Compared on CPU, tensor by tensor, with what a layer of Megatron keeps, kernels of a GPU in the place of torch's norms.
        """
        num_bytes = 2 * self._normed_bytes_per_token + self.mixer_bytes_per_token + self.mlp_bytes_per_token
        return num_bytes - self.saved_bytes_per_token

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes that a layer keeps less in FP8, where casts of the inputs of linear layers take the place of these."""
        return self._attention_saved_bytes_per_token + self._mlp_saved_bytes_per_token

    @property
    def _attention_saved_bytes_per_token(self) -> float:
        """Bytes saved of the input of the first projection. Attention needs its output uncast; so does latent attention its
        input.
        """
        return 0.0 if self.latent_rank is not None else self._saved(self.hidden_bytes_per_token)

    @property
    def _mlp_saved_bytes_per_token(self) -> float:
        """Bytes saved of the inputs of both projections. Experts count as without casts, since each one's rows are padded."""
        inside = self.ffn_hidden_size * self.bytes_per_value / self.ranks
        return 0.0 if self.num_experts is not None else self._saved(self.hidden_bytes_per_token + inside)

    def _saved(self, num_bytes: float) -> float:
        return 0.0 if self.casts is None else num_bytes * (1 - self.casts.input_bytes / self.bytes_per_value)

    @property
    def uncast_bytes_per_token(self) -> float:
        """Bytes that a layer holds while it runs besides as much as it keeps, see `on_device`: what casts to FP8 have saved."""
        return max(self.saved_bytes_per_token, 0.0 if self.dense is None else self.dense.saved_bytes_per_token)

    @property
    def mixer_bytes_per_token(self) -> float:
        """Bytes kept by attention behind its norm; context-parallel ranks keep its output by heads and tokens."""
        width = self._attended_width + self._latents + (self.output_width if self.context_parallel > 1 else 0)
        return width * self.bytes_per_value / self.ranks + 4 * self.heads_on_rank + self._attention_rest_bytes_per_token

    @property
    def _normed_bytes_per_token(self) -> float:
        """Bytes of the input and output of a norm of residual width, and of its statistics."""
        return 2 * self.hidden_bytes_per_token + self._statistics_bytes_per_token

    @property
    def _statistics_bytes_per_token(self) -> float:
        shared = self.tensor_parallel if self.sequence_parallel else 1
        return 4 * self.norm_statistics / (shared * self.context_parallel)

    @property
    def moved_bytes_per_token(self) -> float:
        """Bytes of `layer_bytes_per_token` that memory moves, without the few statistics of norms of residual width, and of the
        outputs of experts, which nothing keeps. A cast, by rows and columns, has as many as its tensor.
        """
        uncast = self.layer_bytes_per_token + self.saved_bytes_per_token
        return uncast + self.routed_bytes_per_token / 2 - 2 * self._statistics_bytes_per_token

    @property
    def attention_moved_bytes_per_token(self) -> float:
        """Bytes of `moved_bytes_per_token` for attention with its norm and projections."""
        return self.attended_bytes_per_token + self._attention_saved_bytes_per_token - self._statistics_bytes_per_token

    @property
    def attended_bytes_per_token(self) -> float:
        """Bytes of `layer_bytes_per_token` held after attention's backward: without the MLP and its norm's input and output."""
        mlp = self.mlp_bytes_per_token - self._mlp_saved_bytes_per_token
        return self.layer_bytes_per_token - mlp - self._normed_bytes_per_token

    @property
    def weight_bytes_per_token(self) -> float:
        """Bytes that a layer's weight gradients need: the input and the output gradient of every linear layer, four of residual
        width.
        """
        inner = (self.mixer_linear_width + self._mlp_width) * self.bytes_per_value / self.ranks
        return 4 * self.hidden_bytes_per_token + inner + self.routed_bytes_per_token

    @property
    def attention_weight_bytes_per_token(self) -> float:
        inner = self.mixer_linear_width * self.bytes_per_value / self.ranks
        return 2 * self.hidden_bytes_per_token + inner

    @property
    def attention_exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of attention and its projections.

        Tensor-parallel ranks, neighbours, reduce the residual stream. Context-parallel ones send queries, keys, values and the
        output to the ranks of their heads.
        """
        heads = (1 - 1 / self.context_parallel) * (self._attended_width * self.bytes_per_value / self.ranks)
        return self._reduced, Exchange(heads, self.context_parallel, self.tensor_parallel)

    @property
    def mlp_exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of the MLP, which reduces the residual stream as the expert of all tokens does, or of the experts.

        A token's copies go to the ranks of their experts and back; where several share an expert, each gathers the copies of
        all.
        """
        if self.num_experts is None:
            return (self._reduced,)
        sharing, copies, limit = self.ranks_of_an_expert, self._copied_bytes_per_token, (self.expert_groups, self.chosen_groups)
        to_experts = Exchange((1 - 1 / self.expert_parallel) * copies, self.expert_parallel, sharing)
        if self.expert_dispatcher != ALLTOALL:
            to_experts = Exchange(*to_experts[:3], self.experts_per_token, *limit)
        gathered = Exchange((sharing - 1) * copies, sharing, 1)
        return (*[self._reduced] * (self.shared_ffn_hidden_size > 0), gathered, to_experts)

    @property
    def exchange_bytes_per_token(self) -> float:
        """Bytes, per token of a chunk, of HybridEP's buffer for the tokens of all ranks that share experts; other buffers are
        fixed.
        """
        if self.num_experts is None or self.expert_dispatcher != "hybridep":
            return 0.0
        return self.expert_parallel * self.ranks_of_an_expert * self.hidden_size * self.bytes_per_value / self.ranks

    @property
    def _reduced(self) -> Exchange:
        residual = self.hidden_size * self.bytes_per_value / self.context_parallel
        return Exchange(2 * (1 - 1 / self.tensor_parallel) * residual, self.tensor_parallel, 1)

    @property
    def tensor_exchanges(self) -> tuple[Exchange, ...]:
        return self._reduced, *([self._reduced] if self.num_experts is None else self.mlp_exchanges[:-1])

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of a layer's forward, and again of its backward, with the ranks that share the layer."""
        return self.attention_exchanges + self.mlp_exchanges

    @property
    def neighbours(self) -> int:
        """Number of neighbouring devices among which a layer is shared: experts over tensor- and context-parallel ranks and
        replicas.
        """
        return max(self.ranks, self.expert_parallel * self.ranks_of_an_expert if self.num_experts else 1)
