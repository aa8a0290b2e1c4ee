"""Vocabulary parallelism in a run: access of the runtime's shards to a rank's model, and their communicators."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.features.vocabulary.headless_stage import HeadlessStage
from megatron_epp.features.vocabulary.pipeline_shards import PipelineShards, ShardGroups, Targets
from megatron_epp.features.vocabulary.shards import Shard
from megatron_epp.features.vocabulary.tied_table import TiedTable
from megatron_epp.features.vocabulary.vocabulary_shard import VocabularyShard
from megatron_epp.mcore.arguments.layout import VOCABULARY_FLAG
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.block_loss import block_tokens_of, weight_gradient
from megatron_epp.mcore.model.stage import ChunkInputs, HeadSettings, MegatronStage
from megatron_epp.mcore.model.trained_rows import rows_to_compute
from megatron_epp.plan import EppError, Op, Plan
from megatron_epp.runtime.autograd.handles import give_gradient
from megatron_epp.runtime.executor import Handler
from megatron_epp.runtime.links.objects import from_each_of_job
from megatron_epp.runtime.side_thread import Background, SideStream, SideThread

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run


class RankVocabulary(RunFeature):
    """A rank's shard of the output layer during training. Without the pipeline's `tied_group` the embedding is not tied."""

    adds_gradients = True

    def __init__(self, run: Run, groups: ShardGroups, tied_group: dist.ProcessGroup | None) -> None:
        stages: Mapping[int, MegatronStage] = run.stages
        args, (first_stage, *_) = run.args, stages.values()
        config, first = first_stage.config, unwrap_model(first_stage.model)
        self._watching = run.watching
        self._shard: VocabularyShard = first.output_layer
        self._any_stage = first_stage
        self._last = next((stage for stage in stages.values() if isinstance(stage, HeadlessStage)), None)
        self.rows_of = self._rows
        self._config, self.groups, self._entries = config, groups, args.padded_vocab_size // args.tensor_model_parallel_size
        self.hidden_size = config.hidden_size
        self._block_tokens = block_tokens_of(args)
        # Collectives of gloo block, so on a CPU they need a thread; on a GPU a stream, launched by the training thread.
        self._background: Background = SideStream() if torch.cuda.is_initialized() else SideThread()
        self._inputs: Callable[[int], ChunkInputs] | None = None
        self._shards: PipelineShards | None = None
        self._tied: TiedTable | None = None
        if tied_group is not None:
            table = first.embedding.word_embeddings if first.pre_process else None
            self._tied = TiedTable(self._shard, table, dist.get_process_group_ranks(tied_group), tied_group)
            self._any_stage.more_weights = self._tied.parameters

    @contextmanager
    def measuring(self) -> Iterator[None]:
        if self._tied is not None:
            self._tied.gather()  # measurements run the first stage
        yield
        if self._tied is not None:
            self._tied.forget_gradient()

    @contextmanager
    def running(
        self, plan: Plan, inputs: Callable[[int], Any] | None, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> Iterator[Mapping[Op, Handler]]:
        self._inputs = inputs
        if self._tied is not None:
            with self._watching("waits for the embedding's rows"):
                self._tied.gather()
            reduction.defer(0)  # the rank's first chunk has the shard, whose gradient is complete in the end
        self._shards = PipelineShards(self, self.groups, None if self._last is None else self, self._background)
        yield self._shards.handlers()
        if self._tied is not None and not plan.forward_only:
            with self._watching("waits for the embedding's gradient"):
                self._tied.add_gradients()
            reduction.reduce_deferred(0)
        self._inputs = None

    @property
    def num_bytes(self) -> int:
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
        whole = partial(_gathered, rows) if parts > 1 else lambda part: part
        return Targets((count, self.hidden_size), labels, weights, whole)

    def _rows(self, loss_mask: Tensor) -> Tensor | None:
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


def fuses_own_gradients(config: Any) -> bool:
    """Return True if weight gradients of layers that are not Transformer Engine's are added with Apex's kernel."""
    return (
        getattr(config, "gradient_accumulation_fusion", False)
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )


def _gathered(rows: Tensor | None, part: Tensor) -> Tensor:
    group = mpu.get_tensor_model_parallel_group()
    whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole if rows is None else whole.index_select(0, rows)


def end_without_head(run: Run, models: Sequence[torch.nn.Module], head: HeadSettings) -> None:
    """Have the last stage end with its hidden states, of which all ranks compute the loss."""
    head.make, head.has_head = HeadlessStage, False


def rank_vocabulary(run: Run) -> RankVocabulary:
    """Return this rank's part of vocabulary parallelism. Every rank of the job must call this.

    Communicators have the options of links. Each is used once here, since NCCL makes a communicator on its first use. Raises
    `EppError` for a frozen parameter: a shard does not know what was done with the weight that it replaces.
    """
    models = [stage.model for stage in run.stages.values()]
    if any(from_each_of_job(any(not parameter.requires_grad for model in models for parameter in model.parameters()))):
        raise EppError(
            f"{VOCABULARY_FLAG} on is for models of which everything trains, and parameters of this one are frozen: set it "
            "to off"
        )
    pipeline = tuple(dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()))
    everyone = tuple(sorted(dist.get_process_group_ranks(mpu.get_model_parallel_group())))
    # Two of the same ranks: NCCL runs the collectives of one communicator one after the other, and with gloo two threads would
    # use one group.
    spread, gather = (run.groups.of(pipeline, options=run.link_options) for _ in range(2))
    statistics = run.groups.of(everyone, options=run.link_options)
    first: Any = unwrap_model(models[0])
    tied = run.groups.of(pipeline, options=run.link_options) if first.output_layer.vocabulary.is_tied else None
    _, _, device = next(iter(run.stages.values())).message(1)
    for group in filter(None, (spread, gather, statistics, tied)):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return RankVocabulary(run, ShardGroups(pipeline[run.placement.last_rank], spread, gather, statistics), tied)
