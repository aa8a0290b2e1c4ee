"""Division of a model's output layer over the pipeline ranks, when Megatron has built the rank's model chunks.

A shard is a submodule of its rank's first model chunk, under the output layer's name, so data parallelism, optimizers and
checkpoints treat its rows like that layer's. The last stage ends with its hidden states. Megatron draws the first weights,
which are sent to their ranks. If the output layer is tied to the embedding, the shards are the only parameters, and the first
stage computes with a copy of all rows (`tied_table`).
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.layout import VOCABULARY_FLAG, placement_of, vocabulary_rows
from megatron_epp.mcore.model.block_loss import loss_obstacle
from megatron_epp.mcore.model.replaced import mark
from megatron_epp.plan import EppError
from megatron_epp.runtime.links.nccl import uses_nccl

_EMBEDDING_KEY = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Division of a vocabulary."""

    rows: tuple[range, ...]  # of each pipeline rank, counted within the tensor-parallel rank's rows
    position: int  # pipeline rank of this process
    first_row: int  # number of the tensor-parallel rank's first row in the whole vocabulary
    entries: int  # of the whole vocabulary, padded
    is_tied: bool

    @property
    def own(self) -> range:
        return self.rows[self.position]

    @property
    def start(self) -> int:
        """Number of this rank's first row in the whole vocabulary."""
        return self.first_row + self.own.start


class VocabularyShard(torch.nn.Module):
    """Rows of an output layer, ``[rows, hidden]``."""

    def __init__(self, rows: torch.Tensor, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = torch.nn.Parameter(rows)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self) -> torch.Tensor:
        """Return the weight. Hooks of Megatron's data parallelism first wait until it is gathered."""
        return self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """Return the rows as a part of the weight that a model without shards has, under its key."""
        assert not sharded_offsets  # an output layer is no layer of many
        vocabulary, weight = self.vocabulary, self.state_dict(keep_vars=True)["weight"]
        name = f"{prefix}weight"
        part = ShardedTensor(
            _EMBEDDING_KEY if vocabulary.is_tied else name,
            weight,
            weight.dtype,
            tuple(weight.shape),
            (vocabulary.entries, weight.shape[1]),
            (vocabulary.start, 0),
            axis_fragmentations=None,  # rows may be divided unevenly
            replica_id=(0, 0, mpu.get_data_parallel_rank(with_context_parallel=True)),
            allow_shape_mismatch=True,
        )
        return {name: part}


_chunks: list[weakref.ref[Any]] = []
"""Model chunks of this rank that are built, from the first one on."""


def divide_output_layer(model: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    """Take the output layer out of a model chunk, and give the rank's first chunk its shard when the last chunk is built.

    To be called with every model chunk as soon as Megatron has built it; with the last one, all ranks of the pipeline
    communicate. Raises `EppError` if the output layer or the loss is not Megatron's, or cannot be divided.
    """
    placement = placement_of(args)
    if model.post_process and (reason := _obstacle(model)):
        raise EppError(f"{VOCABULARY_FLAG} on is not possible: {reason}; set it to off")
    is_tied = bool(model.share_embeddings_and_output_weights)
    if not vp_stage:  # a new model: chunks of one that was not built to its end are forgotten
        _chunks.clear()
    _chunks.append(weakref.ref(model))
    # Megatron is told that there is nothing to tie: it would reduce gradients of whole copies, and keep them in checkpoints.
    model.share_embeddings_and_output_weights = False
    if len(_chunks) < placement.num_chunks:
        return
    chunks: list[Any] = [chunk() for chunk in _chunks]
    _chunks.clear()
    config, tp_rank = model.config, mpu.get_tensor_model_parallel_rank()
    entries = args.padded_vocab_size // args.tensor_model_parallel_size
    rows = vocabulary_rows(entries, placement.num_ranks)
    position = mpu.get_pipeline_model_parallel_rank()
    vocabulary = Vocabulary(rows, position, tp_rank * entries, args.padded_vocab_size, is_tied)
    whole = _take_whole(chunks, is_tied)
    root = 0 if is_tied else placement.last_rank
    shard = VocabularyShard(_own_rows(whole if position == root else None, root, vocabulary, config), vocabulary)
    # Marks that Megatron has given the whole weight, by which optimizers choose learning rates and treat matrices.
    shard.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    if config.use_mup:
        shard.weight.is_embedding_parameter = True  # type: ignore[attr-defined]
    mark(shard, ())  # a program that takes it for the output layer would change weights, not logits
    chunks[0].output_layer = shard


def _take_whole(chunks: Sequence[Any], is_tied: bool) -> torch.Tensor | None:
    whole = None
    for chunk in chunks:
        if chunk.post_process:
            weight = chunk.output_layer.weight
            whole = weight.data if weight is not None and not is_tied else whole
            del chunk.output_layer
            chunk.post_process = False  # from here on: it has built the final norm
        if chunk.pre_process and is_tied:
            table = chunk.embedding.word_embeddings
            whole = table.weight.data
            del table.weight
            table.sharded_state_dict = lambda *_, **__: {}
    return whole


def _own_rows(whole: torch.Tensor | None, root: int, vocabulary: Vocabulary, config: Any) -> torch.Tensor:
    """Return this rank's rows of the weight of rank `root`; other ranks pass None for `whole`."""
    group, own = mpu.get_pipeline_model_parallel_group(), None
    device = torch.device("cuda", torch.cuda.current_device()) if uses_nccl(group) else torch.device("cpu")
    for position, rows in enumerate(vocabulary.rows):
        if whole is None:
            part = torch.empty((len(rows), config.hidden_size), dtype=config.params_dtype, device=device)
        else:
            part = whole[rows.start : rows.stop].to(device).contiguous()
        dist.broadcast(part, dist.get_global_rank(group, root), group=group)
        own = part.clone() if position == vocabulary.position else own
    assert own is not None
    return own


def _obstacle(model: Any) -> str:
    """Return the reason why a model's output layer cannot be divided; empty if it can."""
    if releases.fuses_output_with_loss(model):
        return "--cross-entropy-fusion-impl linear fuses the output layer with the loss"
    return loss_obstacle(model)
