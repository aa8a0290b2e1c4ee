"""Inputs of a rank's stages on their device, uploaded for all chunks of an iteration at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_epp.data.batch import OF_TOKENS, AheadArrays, ChunkArrays, GlobalBatch, InputColumns, LossColumns
from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.plan import Action
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel, of_group
from megatron_epp.runtime.attention.segments import SegmentTable, offsets_of
from megatron_epp.runtime.context import Program, chunk_layouts
from megatron_epp.runtime.upload import Upload, Uploader


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of a rank for all chunks of a batch; `chunks` are empty on a rank whose stages read none.

    `sequence_ends` are int64 ``[sequences + 1]``: offsets of the batch's sequences when they are laid one after the other.
    `program` waits for the upload; None for a baseline.
    """

    upload: Upload
    chunks: tuple[ChunkInputs, ...]
    sequence_ends: Tensor
    program: Program | None = None

    def chunk(self, chunk: int) -> ChunkInputs:
        """Return the inputs of a chunk; without tensors on a rank whose stages read none."""
        return self.chunks[chunk] if self.chunks else ChunkInputs()


RowsOf = Callable[[Tensor], Tensor | None]
"""Function from a loss mask ``[tokens]`` on the CPU to the tokens that pass the output layer, None for all."""


@dataclass(frozen=True, slots=True)
class RankInputs:
    """Reads what a rank's stages need of a batch, and uploads it, by one copy. Its methods may be called in any thread."""

    uploader: Uploader
    context_parallel: ContextParallel = NOT_SHARED
    reads_tokens: bool = True  # the rank has the first or the last stage
    rows_of: RowsOf | None = None  # on a rank with labels, the rows of a chunk; None on other ranks
    depths: int = 0  # of multi-token prediction on this rank
    of_loss: LossColumns | None = None  # what a loss of the user's asks for on this rank; None without one
    # What the rank's stages read of samples; its columns are for a function on the first stage
    of_inputs: InputColumns = OF_TOKENS
    # This rank among those that share a context-parallel rank's tokens outside of attention, and their number
    sequence_part: tuple[int, int] = (0, 1)

    @property
    def reads_positions(self) -> bool:
        """Positions with several axes turn queries and keys of every layer."""
        return self.reads_tokens or self.of_inputs.axes > 1

    def prepare(self, batch: GlobalBatch, actions: tuple[Action, ...]) -> BatchInputs:
        """Prepare a rank's part of a planned batch with these lowered actions, and start to upload what it reads. Raises
        `EppError`, or an error of the operating system, if the tokens cannot be read.
        """
        assert batch.plan is not None
        layouts = chunk_layouts(batch.plan)
        asked = self.depths, self.of_loss, self.of_inputs
        arrays = (batch.chunk(chunk, *asked) for chunk in range(len(batch.plan.chunks)))
        replays = self.of_inputs.routing is not None and getattr(batch.dataset, "has_routes", False)
        inputs = self.upload(arrays, batch.lengths, [layout.table for layout in layouts], replays)
        return replace(inputs, program=Program(actions, layouts, inputs.upload))

    def upload(
        self,
        arrays: Iterable[ChunkArrays],
        lengths: Sequence[int],
        tables: Sequence[SegmentTable] = (),
        replays: bool = False,
    ) -> BatchInputs:
        """Start to upload the inputs of chunks, and the offsets of segment `tables`.

        Arrays are read where stages of the rank need them, and with `replays` where only routers do, to replay their routes.
        """
        positions = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int64), *map(offsets_of, tables)]
        reads = self.reads_positions or self.rows_of is not None or replays
        read = [self._part(each) for each in arrays] if reads else []
        upload = self.uploader.begin([*positions, *_tensors_in(tuple(read))])
        ends, *received = upload.tensors
        for table, offsets in zip(tables, received, strict=False):
            table.take(self.uploader.device, offsets)
        rest = iter(received[len(tables) :])
        return BatchInputs(upload, tuple(self._with_layers(_replaced(part, rest)) for part in read), ends)

    def _part(self, arrays: ChunkArrays) -> ChunkInputs:
        """Return what the rank's stages read of a chunk, on the CPU, with all layers' routes in one tensor."""
        shard, (part, parts), whole = self.context_parallel.shard(len(arrays.tokens)), self.sequence_part, arrays.of_inputs
        own = arrays.part(shard)
        inputs = ChunkInputs(
            tokens=own.tokens[None] if self.reads_tokens else None,
            position_ids=_row(own.position_ids) if self.reads_positions else None,
            of_inputs=whole and whole._replace(tokens=whole.tokens[None], position_ids=_row(whole.position_ids)),
            routes=None if own.routes is None else own.routes.chunk(parts, dim=-1)[part],
        )
        if self.rows_of is None:
            return inputs
        trained = None
        if self.of_loss is not None and arrays.of_loss is not None:
            shards = self.context_parallel.shards_of_loss(self.of_loss.scope, len(arrays.tokens))
            trained = arrays.of_loss.of_trained(shards, shard)
        ahead = own.ahead and AheadArrays(*(column[:, None] for column in own.ahead))
        rows = self.rows_of(own.loss_mask)
        return inputs._replace(labels=own.labels[None], loss_mask=own.loss_mask[None], rows=rows, ahead=ahead, of_loss=trained)

    def _with_layers(self, inputs: ChunkInputs) -> ChunkInputs:
        if self.of_inputs.routing is None or not isinstance(inputs.routes, Tensor):
            return inputs
        return inputs._replace(routes=dict(zip(self.of_inputs.routing.layers, inputs.routes, strict=True)))


def _tensors_in(columns: Any) -> Iterator[Tensor]:
    if isinstance(columns, Tensor):
        yield columns
    for each in columns if isinstance(columns, tuple) else ():
        yield from _tensors_in(each)


def _replaced(columns: Any, tensors: Iterator[Tensor]) -> Any:
    """Return columns with other tensors in the order of `_tensors_in`. torch's own functions leave cycles of references."""
    if isinstance(columns, tuple):
        parts = [_replaced(each, tensors) for each in columns]
        return type(columns)(*parts) if hasattr(columns, "_fields") else tuple(parts)
    return next(tensors) if isinstance(columns, Tensor) else columns


def _row(position_ids: Tensor) -> Tensor:
    """Return positions ``[1, tokens]`` or ``[axes, 1, tokens]``, as Megatron's models take them."""
    return position_ids[..., None, :]


def rank_inputs(stages: Mapping[int, MegatronStage], rows_of: RowsOf | None = None) -> RankInputs:
    """Return the inputs of a rank with these stages; `rows_of` is a feature's that needs labels on every rank."""
    last = next((stage for stage in stages.values() if stage.is_last), None)
    first = next((stage for stage in stages.values() if stage.is_first), None)
    any_stage = next(iter(stages.values()))
    _, _, device = any_stage.message(1)
    names = None if first is None or first.own_inputs is None else first.own_inputs.names
    routing = None
    if layers := [layer for stage in stages.values() for layer in stage.routed_layers]:
        routing = resolve_name("megatron_epp.mcore.model.replayed_routes:routing_of")(any_stage.config, layers)
    sequence_part = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return RankInputs(
        Uploader(device, torch.cuda if device.type == "cuda" else None),
        of_group(mpu.get_context_parallel_group()),
        reads_tokens=any(stage.is_first or stage.is_last for stage in stages.values()),
        rows_of=rows_of or (None if last is None else last.rows),
        depths=0 if last is None else last.depths,
        of_loss=None if last is None else last.asks,
        of_inputs=InputColumns(names, any_stage.axes, routing),
        sequence_part=sequence_part if any_stage.config.sequence_parallel else (0, 1),
    )
