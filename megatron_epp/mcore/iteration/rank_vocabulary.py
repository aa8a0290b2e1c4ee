"""Vocabulary parallelism in a run: access of the runtime's shards to a rank's model, and their communicators."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.mcore.arguments.vocabulary import VOCABULARY_FLAG
from megatron_epp.mcore.model.block_loss import block_tokens_of
from megatron_epp.mcore.model.headless_stage import HeadlessStage
from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.mcore.model.tied_table import TiedTable
from megatron_epp.mcore.model.trained_rows import rows_to_compute
from megatron_epp.mcore.model.vocabulary_shard import VocabularyShard
from megatron_epp.mcore.model.weight_gradients import weight_gradient
from megatron_epp.mcore.patches.environment import fuses_own_gradients
from megatron_epp.plan import EppError, Op
from megatron_epp.runtime.autograd.weights import give_gradient
from megatron_epp.runtime.executor import Handler
from megatron_epp.runtime.links.objects import GroupOptions, Groups, from_each_of_job
from megatron_epp.runtime.loss.pipeline_shards import PipelineShards, ShardGroups, Targets
from megatron_epp.runtime.loss.shards import Shard
from megatron_epp.runtime.side_thread import Background, SideStream, SideThread


class RankVocabulary:
    """A rank's shard of the output layer during training.

    Args:
        stages: the same as stages, by their number in the pipeline.
        tied_group: of the pipeline, for the embedding's rows; None if the output layer is not tied to it.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        models: Sequence[torch.nn.Module],
        stages: Mapping[int, MegatronStage],
        config: Any,
        groups: ShardGroups,
        tied_group: dist.ProcessGroup | None,
    ) -> None:
        first: Any = unwrap_model(models[0])
        self._shard: VocabularyShard = first.output_layer
        self._any_stage = next(iter(stages.values()))
        self._last = next((stage for stage in stages.values() if isinstance(stage, HeadlessStage)), None)
        self._config, self.groups, self._entries = config, groups, args.padded_vocab_size // args.tensor_model_parallel_size
        self.hidden_size = config.hidden_size
        self._block_tokens = block_tokens_of(args)
        # Collectives of gloo block, so on a CPU they need a thread; on a GPU a stream, launched by the training thread.
        self._background: Background = SideStream() if torch.cuda.is_initialized() else SideThread()
        self._inputs: Callable[[int], ChunkInputs] | None = None
        self._shards: PipelineShards | None = None
        self.tied: TiedTable | None = None
        if tied_group is not None:
            table = first.embedding.word_embeddings if first.pre_process else None
            self.tied = TiedTable(self._shard, table, dist.get_process_group_ranks(tied_group), tied_group)
            self._any_stage.more_weights = self.tied.parameters

    def begin(self, inputs: Callable[[int], ChunkInputs]) -> Mapping[Op, Handler]:
        """Start an iteration, whose chunks have the `inputs`; return the handlers of the operations on shards."""
        self._inputs = inputs
        if self.tied is not None:
            self.tied.gather()
        last = None if self._last is None else self
        self._shards = PipelineShards(self, self.groups, last, self._background)
        return self._shards.handlers()

    def end(self) -> None:
        """Release the iteration's inputs."""
        self._inputs = None

    @property
    def num_bytes(self) -> int:
        """Bytes that chunks hold now because of their shard."""
        return 0 if self._shards is None else self._shards.num_bytes

    # What the runtime's shards need (`pipeline_shards.Rank` and `LastStage`).

    def targets(self, chunk: int) -> Targets:
        """Return a chunk's labels and mask, which every rank has in its batch, so that only the hidden states are broadcast."""
        assert self._inputs is not None
        inputs = self._inputs(chunk)
        rows = inputs.rows
        assert inputs.labels is not None  # on a rank with a shard
        assert inputs.loss_mask is not None
        labels, weights = inputs.labels[0], inputs.loss_mask[0]
        num_tokens = len(labels)
        if rows is not None:
            labels, weights = labels.index_select(0, rows), weights.index_select(0, rows)
        if self._config.grad_scale_func is not None:
            weights = weights * self._config.grad_scale_func(torch.ones((), device=weights.device))
        parts = self.num_parts
        count = num_tokens // parts if parts > 1 or rows is None else len(rows)
        whole = partial(_gathered, rows) if parts > 1 else _same
        return Targets((count, self.hidden_size), labels, weights, whole)

    def rows(self, loss_mask: Tensor) -> Tensor | None:
        """Return the tokens that pass the output layer, given their mask ``[tokens]`` on the CPU; None for all."""
        return rows_to_compute(loss_mask, self._entries, self.hidden_size)

    def message(self) -> tuple[torch.dtype, torch.device]:
        _, dtype, device = self._any_stage.message(1)
        return dtype, device

    def shard(self) -> Shard:
        weight = self._shard()  # through the module, whose hooks wait for gathered parameters
        accumulate = partial(weight_gradient, weight, None, True) if fuses_own_gradients(self._config) else None
        return Shard(weight.detach(), self._shard.vocabulary.start, self._block_tokens, accumulate)

    def take_gradient(self, compute: Callable[[], Tensor]) -> None:
        give_gradient(self._shard.weight, compute)

    def spread(self, chunk: int) -> Tensor:
        assert self._last is not None
        assert self._inputs is not None
        rows, output = self._inputs(chunk).rows, self._last.output(chunk)
        return output.contiguous() if rows is None or self.num_parts > 1 else output.index_select(0, rows)

    def finish(self, chunk: int, losses: Tensor, gradient: Tensor | None) -> None:
        assert self._last is not None
        assert self._inputs is not None
        self._last.finish(chunk, self._inputs(chunk), losses, gradient)

    @property
    def num_parts(self) -> int:
        """Number of ranks that each have a part of the last stage's output, by sequence parallelism."""
        return mpu.get_tensor_model_parallel_world_size() if self._config.sequence_parallel else 1


def _same(x: Tensor) -> Tensor:
    return x


def _gathered(rows: Tensor | None, part: Tensor) -> Tensor:
    """Gather the parts of tensor-parallel ranks, and take rows of the whole."""
    group = mpu.get_tensor_model_parallel_group()
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole if rows is None else whole.index_select(0, rows)


def rank_vocabulary(
    args: argparse.Namespace,
    models: Sequence[torch.nn.Module],
    stages: Mapping[int, MegatronStage],
    config: Any,
    last_rank: int,
    groups: Groups,
    options: GroupOptions | None,
) -> RankVocabulary:
    """Return this rank's part of vocabulary parallelism. Every rank of the job must call this.

    Communicators have the same options as links, and each is used once on every rank here, since NCCL makes a communicator on
    its first use.

    Args:
        options: of communicators; None for the backend's defaults.

    Raises:
        EppError: a parameter is frozen, since a shard does not know what was done with the weight whose place it takes.
    """
    if any(from_each_of_job(any(not parameter.requires_grad for model in models for parameter in model.parameters()))):
        raise EppError(
            f"{VOCABULARY_FLAG} on is for models of which everything trains, and parameters of this one are frozen: set it "
            "to off"
        )
    pipeline = tuple(dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()))
    everyone = tuple(sorted(dist.get_process_group_ranks(mpu.get_model_parallel_group())))
    # Two of the same ranks: NCCL runs the collectives of one communicator one after the other, and with gloo two threads would
    # use one group.
    spread, gather = (groups.of(pipeline, options=options) for _ in range(2))
    statistics = groups.of(everyone, options=options)
    first: Any = unwrap_model(models[0])
    tied = groups.of(pipeline, options=options) if first.output_layer.vocabulary.is_tied else None
    _, _, device = next(iter(stages.values())).message(1)
    for group in filter(None, (spread, gather, statistics, tied)):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    shard_groups = ShardGroups(pipeline[last_rank], spread, gather, statistics)
    return RankVocabulary(args, models, stages, config, shard_groups, tied)
