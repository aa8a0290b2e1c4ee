"""Gradients of a training by the parameters' names in the whole model, to compare two trainings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor


def parameters(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all parameters of a rank, with layers numbered through the whole model.

    A copy has the name of what it copies: the output layer's weight, where it is tied to the embedding's and on another rank. A
    part of a weight has its rows behind the name.
    """
    for chunk in model:
        layers = get_attr_wrapped_model(chunk, "decoder").layers  # of which one may be parts of two
        numbers = [getattr(layer, "number_of", lambda _, own=layer.layer_number - 1: own) for layer in layers]
        for name, parameter in chunk.named_parameters():
            shard: Any = getattr(unwrap_model(chunk), "output_layer", None)
            rows: Any = getattr(shard, "vocabulary", None)
            is_part = rows is not None and parameter is shard.weight
            if getattr(parameter, "shared", False) or (is_part and rows.is_tied):
                name = name.replace("output_layer", "embedding.word_embeddings")
            name += f"[{rows.own.start}:{rows.own.stop}]" if is_part else ""
            name = re.sub(r"(?<=decoder\.layers\.)(\d+)\.(.*)", lambda m: f"{numbers[int(m[1])](m[2])}.{m[2]}", name)  # noqa: B023
            yield name, parameter


def reduced_gradients(model: Sequence[Any]) -> dict[str, Tensor]:
    """Return every parameter's gradient by name, with the distributed optimizer's parts gathered from all replicas."""
    whole = {}
    for buffer in (buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        whole[buffer] = buffer.grad_data.clone()
        if buffer.ddp_config.use_distributed_optimizer:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)]
                part = whole[buffer][bucket.offset : bucket.offset + bucket.grad_data.numel()]
                dist.all_gather_into_tensor(part, mine.clone(), group=group)
    gradients = {}
    for name, p in ((name, p) for name, p in parameters(model) if p.requires_grad):
        buffer = next(b for b in whole if p in b.param_index_map)
        start, end, _ = buffer.param_index_map[p]
        gradients[name] = whole[buffer][start:end].view(p.shape)
    return gradients
