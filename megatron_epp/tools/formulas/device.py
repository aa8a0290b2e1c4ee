"""Device memory that is used in addition to the tensors that autograd keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megatron_epp.cost.blocks import HEAD, LAYER, PREDICTION
from megatron_epp.cost.memory import FRAGMENTATION_SHARE
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.output_layer import ShardBytes
from megatron_epp.plan.sizing import FP32_BYTES
from megatron_epp.tools.formulas.model_shape import ModelShape


class MoreBytes(Protocol):
    """Bytes per token that are held besides what a layer keeps, as a `Profile` or a `ModelShape` has them."""

    @property
    def exchange_bytes_per_token(self) -> float: ...
    @property
    def uncast_bytes_per_token(self) -> float: ...
    @property
    def least_working_bytes_per_token(self) -> float: ...


def on_device(
    costs: PipelineCosts,
    fragmentation_share: float | None = None,
    *,
    buffers: Sequence[int] | None = None,
    held: MoreBytes | None = None,
) -> PipelineCosts:
    """Add the device memory that is used in addition to the tensors that autograd keeps, which the costs have.

    A layer's gradients on their way through it, and attention's workspace, take about as much as the layer keeps, and no more:
    each is the gradient of something kept, or, as the fp32 gradient of attention's queries, of its size. Copies of tokens for
    their experts, and kernels of Mamba-2, can take more (`least_working_bytes_per_token`), and gradients are not cast to FP8
    (`uncast_bytes_per_token`). A chunk's whole logits are kept in fp32; while a pass computes them there is a copy of them, or
    of their gradient, in two bytes each.

    `fragmentation_share` is what an allocator loses between its blocks, of the bytes held by chunks (`FRAGMENTATION_SHARE` if
    None); `buffers` are bytes of each stage (`Static`), by default the costs'.
    """
    stages = []
    for number, stage in enumerate(costs.stages):
        static = stage.static if buffers is None else replace(stage.static, buffers=buffers[number])
        running = (stage.layers,) if stage.num_layers else stage.inner
        working = max((block.full_bytes_per_token or block.bytes_per_token for block in running), default=0.0)
        if running and held is not None:
            working = max(working + held.uncast_bytes_per_token, held.least_working_bytes_per_token)
        stage = stage.changed(LAYER, PREDICTION, working_bytes_per_token=working)
        for head in (block for block in stage.ends if block.kind == HEAD and not block.workspace_bytes):
            stage = stage.changed(HEAD, working_bytes_per_token=head.bytes_per_token / 2)
        stages.append(replace(stage, static=static))
    return replace(
        costs,
        stages=tuple(stages),
        fragmentation_share=FRAGMENTATION_SHARE if fragmentation_share is None else fragmentation_share,
        message_bytes_per_token=costs.hidden_bytes_per_token,
        exchange_bytes_per_token=0.0 if held is None else held.exchange_bytes_per_token,
    )


def shard_bytes(shape: ModelShape, *, fused_accumulation: bool = False) -> ShardBytes:
    """Return the bytes of a model's shards; `fused_accumulation` as `loss_workspace_bytes` takes it."""
    blocks, value_bytes, entries = shape.loss_block_tokens, shape.bytes_per_value, shape.vocab_size // shape.tensor_parallel
    # A token of a chunk is on one of the context-parallel ranks.
    hidden, ranks = shape.hidden_size / shape.context_parallel, shape.context_parallel
    copy = value_bytes if value_bytes < FP32_BYTES else 0
    # A block's part of the weight gradient comes when its fp32 logits have gone, and is added to the sum in fp32.
    summed = max(FP32_BYTES * shape.hidden_size, (FP32_BYTES + copy) * shape.hidden_size - FP32_BYTES * blocks)
    gradient = value_bytes * shape.hidden_size if fused_accumulation else summed
    return ShardBytes(
        kept_bytes_per_token=0.0 if blocks else entries * value_bytes / ranks,
        input_bytes_per_token=hidden * (value_bytes + FP32_BYTES),
        passing_bytes_per_token=0.0 if blocks or value_bytes == FP32_BYTES else entries * FP32_BYTES / ranks,
        workspace_bytes=float(blocks * entries * (FP32_BYTES + copy)),
        gradient_workspace_bytes=float(entries * gradient) if blocks else 0.0,
    )
