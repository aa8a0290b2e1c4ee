"""Gradients of a training by the parameters' names in the whole model, to compare two trainings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from megatron.training import training
from torch import Tensor

from megatron_epp.plan.writing import replacing


def parameters(model: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all parameters of a rank, with layers numbered through the whole model.

    A copy has the name of what it copies: the output layer's weight, where it is tied to the embedding's and on another rank. A
    part of a weight has its rows behind the name.
    """
    for chunk in model:
        numbers = [layer.layer_number - 1 for layer in get_attr_wrapped_model(chunk, "decoder").layers]
        for name, parameter in chunk.named_parameters():
            if hasattr(shard := getattr(unwrap_model(chunk), "output_layer", None), "vocabulary"):  # its rows are divided
                name = _name_of_shard(name, parameter, shard)
            if getattr(parameter, "shared", False):
                name = name.replace("output_layer", "embedding.word_embeddings")
            yield re.sub(r"(?<=decoder\.layers\.)\d+", lambda m: str(numbers[int(m[0])]), name), parameter  # noqa: B023


def _name_of_shard(name: str, parameter: torch.nn.Parameter, shard: Any) -> str:
    """Add the rows to the name of a shard's weight, which is named as the embedding if the two are tied."""
    if parameter is not shard.weight:
        return name
    whole = name.replace("output_layer", "embedding.word_embeddings") if shard.vocabulary.is_tied else name
    return f"{whole}[{shard.vocabulary.own.start}:{shard.vocabulary.own.stop}]"


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
    for name, p in parameters(model):
        if not p.requires_grad:
            continue
        buffer = next(b for b in whole if p in b.param_index_map)
        start, end, _ = buffer.param_index_map[p]
        gradients[name] = whole[buffer][start:end].view(p.shape)
    return gradients


def record_first(path: Path) -> None:
    """Make the training of this process write the gradients of its first iteration, as the optimizer gets them, to a file."""
    step = training.train_step

    def train_step(
        forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any, passes: Any, **named: Any
    ) -> Any:
        def recorded_passes(**call: Any) -> Any:
            answer = passes(**call)
            if not path.exists():
                with replacing(path) as scratch:
                    torch.save({name: gradient.cpu() for name, gradient in reduced_gradients(model).items()}, scratch)
            return answer

        return step(forward_step, data, model, optimizer, scheduler, config, recorded_passes, **named)

    path.unlink(missing_ok=True)
    training.train_step = train_step
