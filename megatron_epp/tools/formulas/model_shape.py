"""Shape of a GPT, and the bytes and exchanges per layer and token that follow from it on one rank; layers with a recurrence."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Self

from megatron_epp.plan.flags import ALLTOALL
from megatron_epp.tools.formulas.layer_sizes import DeltaNet, LayerSizes, StateSpace

RECURRENT = {"G": "delta", "M": "mamba"}  # fields with the sizes of recurrences, by the symbols of `ModelShape.mixers`


class Exchange(NamedTuple):
    """Exchange of a rank with a group of ranks, per token of a chunk, in a layer's forward and again in its backward."""

    num_bytes: float  # that it sends to the others, where every copy is sent by itself
    ranks: int  # of the group
    spacing: int  # from one rank of the group to the next, in devices
    # Of a token, each to a rank of the group; more than 0 if a node, and a rank, gets one for all of its experts
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
class ModelShape(LayerSizes):
    """A layer's kept, moved and exchanged bytes, of layers with attention, and with experts if there are others too."""

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
        # Latents once more before their norms, and the keys' part that turns: to these the hidden state is projected.
        down = 0 if self.latent_rank is None else self._latents + self.rotated_channels
        return self.query_width + self.output_width + self.cached_width + self._latents + down

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
        """Bytes that attention keeps besides: what norms read, statistics, angles, a gate; ranks may share keys."""
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
        """Bytes kept by a layer, without masks of dropout: norms', attention's, the MLP's; compared with Megatron's on CPU."""
        num_bytes = 2 * self._normed_bytes_per_token + self.mixer_bytes_per_token + self.mlp_bytes_per_token
        return num_bytes - self.saved_bytes_per_token

    @property
    def saved_bytes_per_token(self) -> float:
        """Bytes that a layer keeps less in FP8, where casts of the inputs of linear layers take the place of these."""
        return self._attention_saved_bytes_per_token + self._mlp_saved_bytes_per_token

    @property
    def _attention_saved_bytes_per_token(self) -> float:
        """Bytes saved of the first projection's input; attention needs its output uncast, latent attention its input."""
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
    def least_working_bytes_per_token(self) -> float:
        """Bytes that some layer of the model holds while it runs besides what it keeps, where these may be more than that."""
        if self.mamba is None:
            return self.dispatched_bytes_per_token
        recurrence = self.mamba.gradient_bytes(self.bytes_per_value) / self.ranks
        return max(self.dispatched_bytes_per_token, recurrence + self.hidden_bytes_per_token)  # and the stream's gradient

    @property
    def cast_bytes(self) -> float:
        """Bytes of the casts to FP8 of a parameter of a layer."""
        return 0.0 if self.casts is None else self.casts.weight_bytes

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
        """Bytes of `layer_bytes_per_token` that memory moves: uncast, with experts' outputs, without statistics of norms."""
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
        """Bytes that weight gradients need: input and output gradient of every linear layer, four of residual width."""
        inner = (self.mixer_linear_width + self._mlp_width) * self.bytes_per_value / self.ranks
        return 4 * self.hidden_bytes_per_token + inner + self.routed_bytes_per_token

    @property
    def attention_exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of attention: of tensor-parallel neighbours' residual stream, and over context-parallel ranks by heads."""
        heads = (1 - 1 / self.context_parallel) * (self._attended_width * self.bytes_per_value / self.ranks)
        return self._reduced, Exchange(heads, self.context_parallel, self.tensor_parallel)

    @property
    def mlp_exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of the MLP's residual stream, or of experts' copies, which several ranks of an expert gather."""
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
        """Bytes per token of a chunk of HybridEP's buffer, for all ranks that share experts; other buffers are fixed."""
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
        """Number of neighbouring devices among which a layer is shared, also experts over ranks of several replicas."""
        return max(self.ranks, self.expert_parallel * self.ranks_of_an_expert if self.num_experts else 1)


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
