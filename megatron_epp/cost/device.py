"""Device memory that is used in addition to the tensors that autograd keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.blocks import ATTENTION, LAYER, MLP, PREDICTION
from megatron_epp.cost.memory import FRAGMENTATION_SHARE
from megatron_epp.cost.model import PipelineCosts


def on_device(
    costs: PipelineCosts,
    fragmentation_share: float | None = FRAGMENTATION_SHARE,
    *,
    buffers: Sequence[int] | None = None,
) -> PipelineCosts:
    """Add that memory to costs.

    A layer's gradients on their way through it, and attention's workspace, take about as much as the layer keeps, and no more:
    each is the gradient of something kept, or, as the fp32 gradient of attention's queries, of its size.

    Args:
        costs: costs that count kept tensors only.
        fragmentation_share: share of the bytes held by chunks that an allocator loses between its blocks; None as in the costs.
        buffers: bytes of each stage, see `Static`; None as in the costs.
    """
    stages = []
    for number, stage in enumerate(costs.stages):
        static = stage.static if buffers is None else replace(stage.static, buffers=buffers[number])
        running = (stage.layers,) if stage.num_layers else stage.inner
        working = max((block.full_bytes_per_token or block.bytes_per_token for block in running), default=0.0)
        stages.append(replace(stage.changed(LAYER, ATTENTION, MLP, PREDICTION, working_bytes_per_token=working), static=static))
    share = costs.fragmentation_share if fragmentation_share is None else fragmentation_share
    per_token = costs.hidden_bytes_per_token
    return replace(costs, stages=tuple(stages), fragmentation_share=share, message_bytes_per_token=per_token)
