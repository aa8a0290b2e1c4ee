"""Costs of a GPT from its shape: counted operations and bytes, divided by a few measured rates.

Good to within tens of percent, which is enough to plan with before anything was measured on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.cost.stage import Line, PipelineCosts, StageCosts
from megatron_epp.schedule import EppError

MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a GPT and how one layer is spread over ranks.

    Attributes:
        num_layers: of the whole model.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width inside the MLP.
        num_attention_heads: query heads.
        num_query_groups: key and value heads; None means as many as query heads.
        kv_channels: width of a head; None means hidden_size / num_attention_heads.
        vocab_size: after padding.
        gated_mlp: two input projections (SwiGLU) instead of one.
        bytes_per_value: of activations and messages (2 for bf16, 4 for fp32).
        tensor_parallel: ranks that share the heads, the MLP and the vocabulary.
        sequence_parallel: those ranks also share the tokens between the layers' matrix products.
        context_parallel: ranks that share the tokens (the heads, inside attention).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    vocab_size: int
    gated_mlp: bool = True
    bytes_per_value: int = 2
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * (self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def kv_width(self) -> int:
        """Of the keys, and again of the values."""
        groups = self.num_query_groups or self.num_attention_heads
        return groups * (self.kv_channels or self.hidden_size // self.num_attention_heads)

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        return attention + (3 if self.gated_mlp else 2) * self.hidden_size * self.ffn_hidden_size

    @property
    def vocabulary_parameters(self) -> int:
        """Of the embedding, and again of the output layer where it is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def hidden_bytes_per_token(self) -> float:
        """The residual stream of one token on one rank."""
        shared = self.tensor_parallel if self.sequence_parallel else 1
        return self.hidden_size * self.bytes_per_value / (shared * self.context_parallel)

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.kv_width * self.bytes_per_value / (self.tensor_parallel * self.context_parallel)

    @property
    def layer_bytes_per_token(self) -> float:
        """Kept by a layer: four of residual width (input and output of either norm), queries, keys, values and attention's
        output, what enters and leaves the MLP's nonlinearity, and one fp32 number per head (log-sum-exp).
        """
        mlp = (3 if self.gated_mlp else 2) * self.ffn_hidden_size
        values = 2 * self.query_width + 2 * self.kv_width + mlp
        inside = values * self.bytes_per_value + 4 * self.num_attention_heads
        return 4 * self.hidden_bytes_per_token + inside / (self.tensor_parallel * self.context_parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank does per second, and what each pass costs on top.

    Attributes:
        name: for the plan's record.
        linear_flops: in the matrix products with weights.
        attention_forward_flops: in attention, counting only the pairs inside the mask.
        attention_backward_flops: the same, backward.
        memory_bytes: moved by norms, activations and residual additions.
        layer_overhead_us: launch and other fixed time of one layer and pass.
        message_latency_us: of a message between stages.
        message_bytes: per second between stages.
    """

    name: str
    linear_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes: float
    layer_overhead_us: float
    message_latency_us: float
    message_bytes: float


H100 = Rates(
    name="h100",
    linear_flops=600e12,
    attention_forward_flops=450e12,
    attention_backward_flops=400e12,
    memory_bytes=2.4e12,
    layer_overhead_us=150.0,
    message_latency_us=20.0,
    message_bytes=40e9,
)
"""An H100-like GPU in bf16, one 400 Gb/s link between stages."""

CPU = Rates(
    name="cpu",
    linear_flops=40e9,
    attention_forward_flops=15e9,
    attention_backward_flops=10e9,
    memory_bytes=5e9,
    layer_overhead_us=600.0,
    message_latency_us=300.0,
    message_bytes=1e9,
)
"""One core in fp32 and gloo: for tests and laptops."""


def analytic_costs(
    shape: ModelShape, rates: Rates, layers_per_stage: Sequence[int], *, state_bytes_per_parameter: float = 18.0
) -> PipelineCosts:
    """Costs of a pipeline. The first stage embeds; the last has the final norm, the logits and the loss.

    Args:
        shape: of the model.
        rates: of the machine.
        layers_per_stage: layers of each stage; their sum must be the model's.
        state_bytes_per_parameter: weight, gradient and optimizer state; 18 is bf16 Adam with fp32 gradients and master
            weights and nothing sharded. With a distributed optimizer over d replicas it is 6 + 12 / d.

    Raises:
        EppError: the layers do not add up.
    """
    if sum(layers_per_stage) != shape.num_layers or min(layers_per_stage, default=-1) < 0:
        raise EppError(f"stages of {list(layers_per_stage)} layers do not make the model's {shape.num_layers} (--num-layers)")
    last = len(layers_per_stage) - 1
    stages = tuple(
        _stage(shape, rates, layers, stage == 0, stage == last, state_bytes_per_parameter)
        for stage, layers in enumerate(layers_per_stage)
    )
    return PipelineCosts(
        name=f"analytic:{rates.name}",
        stages=stages,
        hidden_bytes_per_token=shape.hidden_bytes_per_token,
        message_latency_us=rates.message_latency_us,
        message_us_per_byte=MICROSECONDS / rates.message_bytes,
    )


def _stage(shape: ModelShape, rates: Rates, layers: int, first: bool, last: bool, state_bytes: float) -> StageCosts:
    head_forward, head_backward, head_bytes = _head(shape, rates) if last else (Line(), Line(), 0.0)
    copy = Line(0.0, MICROSECONDS * 2 * shape.hidden_bytes_per_token / rates.memory_bytes)
    vocabulary = (int(first) + int(last)) * shape.vocabulary_parameters
    parameters = (layers * shape.layer_parameters + vocabulary) / shape.tensor_parallel
    return StageCosts(
        num_layers=layers,
        forward=_layer_forward(shape, rates),
        backward=_layer_backward(shape, rates),
        extra_forward=head_forward + (copy if first else Line()),
        extra_backward=head_backward + (copy if first else Line()),
        layer_bytes_per_token=shape.layer_bytes_per_token,
        recomputed_layer_bytes_per_token=shape.hidden_bytes_per_token,
        extra_bytes_per_token=shape.hidden_bytes_per_token + head_bytes,
        head_bytes_per_token=head_bytes,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        static_bytes=int(parameters * state_bytes),
    )


def _layer_forward(shape: ModelShape, rates: Rates) -> Line:
    ranks = shape.tensor_parallel * shape.context_parallel
    linear = 2 * shape.layer_parameters / ranks / rates.linear_flops
    moved = 2 * shape.layer_bytes_per_token / rates.memory_bytes
    pair = 4 * shape.query_width / ranks / rates.attention_forward_flops
    return Line(rates.layer_overhead_us, MICROSECONDS * (linear + moved), MICROSECONDS * pair)


def _layer_backward(shape: ModelShape, rates: Rates) -> Line:
    """Twice the matrix products with weights; five products over the pairs where forward has two."""
    ranks = shape.tensor_parallel * shape.context_parallel
    linear = 4 * shape.layer_parameters / ranks / rates.linear_flops
    moved = 3 * shape.layer_bytes_per_token / rates.memory_bytes
    pair = 10 * shape.query_width / ranks / rates.attention_backward_flops
    return Line(rates.layer_overhead_us, MICROSECONDS * (linear + moved), MICROSECONDS * pair)


def _head(shape: ModelShape, rates: Rates) -> tuple[Line, Line, float]:
    """Final norm, logits and loss: forward, backward, and what they keep (the norm's two tensors, fp32 probabilities)."""
    ranks = shape.tensor_parallel * shape.context_parallel
    kept = 4.0 * shape.vocab_size / ranks + 2 * shape.hidden_bytes_per_token
    linear = 2 * shape.vocabulary_parameters / ranks / rates.linear_flops
    moved = 3 * kept / rates.memory_bytes
    forward = Line(rates.layer_overhead_us, MICROSECONDS * (linear + moved))
    backward = Line(rates.layer_overhead_us, MICROSECONDS * (2 * linear + moved))
    return forward, backward, kept
