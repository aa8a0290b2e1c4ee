"""A run by plans with groups of context-parallel ranks: process groups of every degree, and a rank's own part of chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.contrib.flexsp import NAME
from megatron_epp.contrib.flexsp.context_groups import ContextGroups, groups_of
from megatron_epp.data.batch import ChunkArrays, GlobalBatch
from megatron_epp.mcore.iteration.device_inputs import BatchInputs, RankInputs
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.training.nccl_settings import reduce_once
from megatron_epp.plan import Action, Chunk, EppError, Plan, Remedy
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel, of_group
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkLayout, Program, chunk_layouts

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.sliced_run import SlicedRun


class GroupRun(RunFeature):
    """Groups of 1, 2, 4, ... context-parallel ranks in a run, each of the ranks that follow a multiple of its size.

    Raises `EppError` where chunks are not the plan's own, or a loss of the user's reads the tokens of all ranks.
    """

    def __init__(self, run: SlicedRun) -> None:
        if run.loss is not None or not run.makes_chunks:
            raise EppError(f"{NAME} is for documents with Megatron's loss, in chunks that plans make: use greedy")
        self._run, whole = run, mpu.get_context_parallel_group()
        ranks, self._own = dist.get_process_group_ranks(whole), dist.get_rank(whole)
        self._groups = {len(ranks): whole}
        for power in range(1, len(ranks).bit_length() - 1):
            first = self._own >> power << power
            self._groups[1 << power] = run.groups.of(tuple(ranks[first : first + (1 << power)]))

    def allocate(self) -> None:
        reduce_once(self._groups.values(), self._run.device)

    def settled(self, costs: PipelineCosts) -> None:
        known, ranks = len(costs.context_exchange_us), max(self._groups)
        if not known or 1 << (known - 1) != ranks:
            remedy = Remedy("set", "costs", "analytic")
            raise EppError(f"{NAME} needs to know what exchanges of groups of {ranks} context-parallel ranks take", remedy)
        inputs = self._run.inputs
        as_before = {own.name: getattr(inputs, own.name) for own in fields(inputs)} | {"context_parallel": NOT_SHARED}
        shared = {degree: of_group(group) for degree, group in self._groups.items()} | {1: NOT_SHARED}
        self._run.inputs = GroupInputs(**as_before, own_rank=self._own, shared=shared)


@dataclass(frozen=True, slots=True)
class GroupInputs(RankInputs):
    """Reads and uploads this rank's part of chunks that groups share; `shared` are the schemes of its groups by degree."""

    own_rank: int = 0  # among the context-parallel ranks
    shared: Mapping[int, ContextParallel] = field(default_factory=dict)

    def prepare(self, batch: GlobalBatch, actions: tuple[Action, ...]) -> BatchInputs:
        assert batch.plan is not None
        groups = groups_of(batch.plan.extensions)
        assert groups is not None  # of every plan of this planner
        layouts = tuple(self._layout(batch.plan, c, groups, layout) for c, layout in enumerate(chunk_layouts(batch.plan)))
        arrays = (self._arrays(batch, layout) for layout in layouts)
        inputs = self.upload(arrays, batch.lengths, [layout.table for layout in layouts])
        return replace(inputs, program=Program(actions, layouts, inputs.upload))

    def _layout(self, plan: Plan, chunk: int, groups: ContextGroups, whole: ChunkLayout) -> ChunkLayout:
        """Return the layout of what this rank's group has of a chunk, which is padding where it has nothing."""
        _, degree, held = groups.of_rank(chunk, self.own_rank)
        own = Chunk(tuple(plan.chunks[chunk].segments[at] for at in held))
        share = groups.num_ranks // degree
        table = SegmentTable.build(own, own.padded_tokens(plan.token_multiple // share))
        return whole._replace(table=table, context_parallel=self.shared[degree], share=share)

    def _arrays(self, batch: GlobalBatch, layout: ChunkLayout) -> ChunkArrays:
        table, shared = layout.table, layout.context_parallel or NOT_SHARED
        arrays = batch.chunk_of(table.segments[: table.num_sequences], table.num_tokens, self.depths)
        return arrays.part(shared.shard(table.num_tokens))
