"""One iteration's sequences and plan, and the arrays of each of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import torch

from megatron_epp.plan.action import Action
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.plan import Plan

if TYPE_CHECKING:
    from megatron_epp.data.routes import Routing
    from megatron_epp.losses.loss import Average

PADDING_TOKEN = 0


class SequenceDataset(Protocol):
    """Sequences whose `lengths` are known without reading them: input tokens, one less than each has in its file."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens ``[start, end)`` of the ``lengths[index] + 1`` tokens of a sequence; any integer type."""
        ...

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        """Mask of these tokens: 1 for a token that is trained where it is a label, 0 for others; None if all are trained."""
        ...


class AheadArrays(NamedTuple):
    """Inputs of multi-token prediction for a chunk: CPU tensors of shape ``[depth, padded tokens]``, or of a part of them.

    Depth ``d``, counted from 1, reads the token ``d`` positions ahead, and predicts the one after it. Behind the end of a
    sequence, and in padding, all of it is 0.
    """

    tokens: torch.Tensor  # int64, the token ahead
    position_ids: torch.Tensor  # int64, its position
    labels: torch.Tensor  # int64, the label of the position ahead
    # float32, 1 over the number of positions of the whole sequence that count at this depth, where the position counts, else 0:
    # a sequence's losses times these add up to its mean
    shares: torch.Tensor
    weights: torch.Tensor  # float32, `shares` times the number of positions that count in the sequence's main loss


@dataclass(frozen=True, slots=True)
class LossArrays:
    """Inputs of a loss for a chunk besides its labels' log-probabilities: CPU tensors."""

    # float32 ``[padded tokens]``, how much a token counts (`losses.Average`); 0 for tokens that are not trained
    weights: torch.Tensor
    counts: torch.Tensor  # float32 ``[padded tokens]``, a token's part in the number by which the batch's loss is divided
    sequence: torch.Tensor  # int64 ``[padded tokens]``, the position of the token's sequence in the batch; 0 for padding
    group: torch.Tensor  # the same of the first sequence of its group, which is itself but in `losses.Scope.GROUP`
    # float32 ``[rows, padded tokens]``, in the order of the loss's names, each as many rows as it is wide
    columns: torch.Tensor

    def of_trained(self, shards: Sequence[Sequence[slice]], own: Sequence[slice]) -> TrainedTokens:
        """Return the inputs of trained tokens, selected on the CPU; `shards` are (padded) tokens of each rank of the loss."""
        tokens = joined(torch.arange(len(self.weights)), [part for shard in shards for part in shard])
        rows = self.weights[tokens].nonzero()[:, 0]
        at, count = tokens[rows], joined(self.counts, own).sum()
        return TrainedTokens(rows, count, self.weights[at], self.sequence[at], self.group[at], self.columns[:, at])


class TrainedTokens(NamedTuple):
    """Inputs of a loss for the trained tokens of a chunk, among the tokens of one or all of the ranks that share it."""

    rows: torch.Tensor  # int64 ``[trained]``, their places among the tokens of these ranks, laid one after the other
    counted: torch.Tensor  # float32 ``[]``, this rank's part in the number by which the batch's loss is divided
    # weights, sequence, group, columns: as in `LossArrays`, ``[trained]`` and ``[rows, trained]``
    weights: torch.Tensor
    sequence: torch.Tensor
    group: torch.Tensor
    columns: torch.Tensor


def joined(x: torch.Tensor, parts: Sequence[slice]) -> torch.Tensor:
    """Return parts of the tokens of a tensor ``[*, tokens]``, one after the other; a view if it is one part."""
    return x[..., parts[0]] if len(parts) == 1 else torch.cat([x[..., part] for part in parts], dim=-1)


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """A span of a sample, one of those of the call, among the tokens of a chunk, in which all of it is."""

    start: int
    num_tokens: int
    sample: int
    _number: int  # among the spans of the sample
    _samples: Any  # which may take other payloads until this one is read

    @property
    def payload(self) -> Any:
        return self._samples[self.sample].payloads[self._number]


class InputArrays(NamedTuple):
    """Inputs of a caller's function for a chunk, CPU tensors: int64 tokens and positions, float32 columns, 0 in padding."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    columns: tuple[torch.Tensor, ...]
    spans: tuple[ChunkSpan, ...]


class InputColumns(NamedTuple):
    names: tuple[str, ...] | None = None  # of columns for a caller's function; None without such a function
    axes: int = 1  # of positions; 1 for the places of tokens in their sequence
    routing: Routing | None = None


OF_TOKENS = InputColumns()  # tokens and their places alone


class LossColumns(NamedTuple):
    """Names of the columns that a loss reads, and how it averages; see `losses.Loss` for `widths` and `group_problem`."""

    names: tuple[str, ...]
    average: Average
    widths: Mapping[str, int] = {}
    candidates: str | None = None
    has_values: bool = False
    scope: str = "token"
    group_problem: Callable[[Sequence[Mapping[str, np.ndarray]]], str] | None = None


@dataclass(frozen=True, slots=True)
class ChunkArrays:
    """Inputs of the first and last stage for a chunk, CPU tensors ``[padded tokens]`` or parts; None for what none needs."""

    tokens: torch.Tensor
    labels: torch.Tensor  # the token that follows each input, int64 as the inputs are
    # float32, 1 where the position counts in the loss, 0 elsewhere and in padding. A position counts if its label is a trained
    # token of the dataset, and its input is not the batch's `mask_loss_of`.
    loss_mask: torch.Tensor
    # int64, position in its own sequence; 0, 1, 2, ... in padding. ``[axes, padded tokens]`` with several axes.
    position_ids: torch.Tensor
    ahead: AheadArrays | None = None
    of_loss: LossArrays | None = None
    of_inputs: InputArrays | None = None
    # int16 ``[layers, experts per token, padded tokens]``, which routers replay; None where they choose
    routes: torch.Tensor | None = None

    def part(self, shard: Sequence[slice]) -> ChunkArrays:
        """Return the part of the arrays of one of the ranks that share the chunk's tokens, without inputs of functions."""
        whole = self.tokens, self.labels, self.loss_mask, self.position_ids
        tokens, labels, loss_mask, position_ids = (joined(x, shard) for x in whole)
        ahead = None if self.ahead is None else AheadArrays(*(joined(column, shard) for column in self.ahead))
        routes = None if self.routes is None else joined(self.routes, shard)
        return ChunkArrays(tokens, labels, loss_mask, position_ids, ahead, routes=routes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Sequences of a global batch: all, or this replica's (`part`). Tokens are read only when a chunk is requested."""

    indices: tuple[int, ...]  # of the sequences in the dataset
    lengths: tuple[int, ...]  # the positions each sequence trains
    # A number for each sequence, equal for those whose loss is computed together (`Problem.loss_groups`)
    loss_groups: tuple[int, ...] = ()
    plan: Plan | None = None  # None if the batch is used without a plan
    dataset: SequenceDataset = field(repr=False, compare=False)  # source of the tokens; None in a batch that has been pickled
    mask_loss_of: int | None = None  # positions whose input is this token do not count in the loss (``eod_mask_loss``)
    global_size: int = 0  # samples of the whole batch, over all replicas: sequences, or groups of them with one loss
    consumed_samples: int = 0  # sequences that batches have had over all replicas up to this one, its own included
    trains: bool = True  # some token of the whole batch, over all replicas, is trained
    planning_us: float = field(default=0.0, compare=False)  # time of planning, on the planning rank
    peak_items: dict[str, int] | None = field(default=None, compare=False)  # see `PackedPlan`
    plan_digest: str = field(default="", compare=False)
    actions: tuple[Action, ...] | None = field(default=None, repr=False, compare=False)  # this rank's of the plan, lowered
    # What the plan's source has made of the batch for this rank, ahead of the iteration
    prepared: Any = field(default=None, repr=False, compare=False)
    _counts: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _groups: list[list[int]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __copy__(self) -> GlobalBatch:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what `PlannedBatches.restored` completes: Megatron saves batches that it is to run again in a checkpoint."""
        return restored_batch, ({key: getattr(self, key) for key in _PICKLED},)

    def name_of(self, sequence: int) -> str:
        index = self.indices[sequence]
        names: Sequence[str] = getattr(self.dataset, "names", ())
        return names[index] if names else f"sequence {index}"

    def part(self, share: Sequence[int]) -> GlobalBatch:
        """A replica's part of a whole batch: the sequences at these positions."""
        indices, lengths = tuple(self.indices[at] for at in share), tuple(self.lengths[at] for at in share)
        loss_groups = tuple(self.loss_groups[at] for at in share) if self.loss_groups else ()
        return replace(self, indices=indices, lengths=lengths, loss_groups=loss_groups)

    def chunk(
        self, chunk: int, depths: int = 0, of_loss: LossColumns | None = None, of_inputs: InputColumns = OF_TOKENS
    ) -> ChunkArrays:
        """The arrays of one chunk of the plan, padded to ``plan.padded_tokens(chunk)``; see `chunk_of`."""
        assert self.plan is not None, "this batch carries no plan; use chunk_of"
        return self.chunk_of(self.plan.chunks[chunk].segments, self.plan.token_multiple, depths, of_loss, of_inputs)

    def chunk_of(
        self,
        segments: Sequence[Segment],
        multiple: int = 1,
        depths: int = 0,
        of_loss: LossColumns | None = None,
        of_inputs: InputColumns = OF_TOKENS,
    ) -> ChunkArrays:
        """The arrays of segments, padded to a multiple; `depths` are of prediction, columns for a function of `of_inputs`."""
        chunk = Chunk(tuple(segments))
        num_padded = chunk.padded_tokens(multiple)
        tokens = np.full(num_padded, PADDING_TOKEN, dtype=np.int64)
        labels = np.full(num_padded, PADDING_TOKEN, dtype=np.int64)
        position_ids = np.empty((of_inputs.axes, num_padded), dtype=np.int64)
        loss_mask = np.ones(num_padded, dtype=np.float32)
        kinds = np.int64, np.int64, np.int64, np.float32, np.float32
        ahead = tuple(np.zeros((depths, num_padded), dtype=kind) for kind in kinds)
        at = 0
        for sequence, start, end in chunk.segments:
            text, mask = self._read(sequence, start, min(end + depths, self.lengths[sequence]))
            num_tokens, after = end - start, at + end - start
            tokens[at:after], labels[at:after] = text[:num_tokens], text[1 : num_tokens + 1]
            position_ids[:, at:after], loss_mask[at:after] = self._positions(of_inputs, sequence, start, end), mask[:num_tokens]
            for depth, counts in enumerate(self._counted(sequence, depths), start=1):
                there = max(0, min(num_tokens, len(mask) - depth))  # positions whose position ahead is in the sequence
                shares = mask[depth : depth + there] / max(1, counts)
                whole = shares * self._count(sequence)
                positions = np.arange(start + depth, start + depth + there)
                of_depth = text[depth : depth + there], positions, text[depth + 1 : depth + 1 + there], shares, whole
                for rows, values in zip(ahead, of_depth, strict=True):
                    rows[depth - 1, at : at + there] = values
            at = after
        position_ids[:, at:] = np.arange(num_padded - at)
        loss_mask[at:] = 0.0
        own, more = torch.from_numpy, AheadArrays(*map(torch.from_numpy, ahead)) if depths else None
        read = None if of_loss is None else self._of_loss(chunk.segments, loss_mask, of_loss)
        at_axes = own(position_ids if of_inputs.axes > 1 else position_ids[0])
        of_function = None
        if of_inputs.names is not None:
            columns = tuple(own(self._column(name, chunk.segments, num_padded)) for name in of_inputs.names)
            of_function = InputArrays(own(tokens), at_axes, columns, tuple(self._spans(chunk.segments)))
        routes = None
        if of_inputs.routing is not None and getattr(self.dataset, "has_routes", False):
            from megatron_epp.data.routes import routes_of_chunk  # here, since most trainings have none

            routes = routes_of_chunk(self._samples, self.indices, chunk.segments, num_padded, of_inputs.routing)
        return ChunkArrays(own(tokens), own(labels), own(loss_mask), at_axes, more, read, of_function, routes)

    def _positions(self, asked: InputColumns, sequence: int, start: int, end: int) -> np.ndarray:
        own = self._samples[self.indices[sequence]].positions if asked.axes > 1 else None
        return np.arange(start, end)[None] if own is None else own[start:end].T

    def _column(self, name: str, segments: Sequence[Segment], num_tokens: int) -> np.ndarray:
        parts = [self._samples[self.indices[row]].inputs[name][start:end] for row, start, end in segments]
        padding = np.zeros((num_tokens - sum(map(len, parts)), *parts[0].shape[1:]), dtype=np.float32)
        return np.concatenate([*parts, padding])

    def _spans(self, segments: Sequence[Segment]) -> Iterator[ChunkSpan]:
        at = 0
        for row, start, end in segments:
            for number, span in enumerate(self._samples[index := self.indices[row]].spans):
                if start <= span.start < end:
                    yield ChunkSpan(at + span.start - start, span.end - span.start, index, number, self._samples)
            at += end - start

    @property
    def _samples(self) -> Any:
        return self.dataset

    def _of_loss(self, segments: Sequence[Segment], loss_mask: np.ndarray, wanted: LossColumns) -> LossArrays:
        """Read a loss's inputs of segments, whose mask is given with its padding."""
        from megatron_epp.losses.loss import Average  # here, since most trainings have no loss of the user's

        num_tokens = len(loss_mask)
        weights, (sequence, group) = loss_mask.copy(), np.zeros((2, num_tokens), dtype=np.int64)
        members = self._members()
        counts = loss_mask if wanted.average is Average.TOKENS else np.zeros(num_tokens, dtype=np.float32)
        columns = [np.zeros((wanted.widths.get(name, 1), num_tokens), dtype=np.float32) for name in wanted.names]
        at = 0
        for row, start, end in segments:
            here = slice(at, at := at + end - start)
            sequence[here], group[here] = row, members[row][0]
            for values, name in zip(columns, wanted.names, strict=True):
                values[:, here] = self._samples.column(name, self.indices[row], start + 1, end + 1).T
            if wanted.average is Average.TOKENS:
                continue
            whole, total = end == self.lengths[row], self._count(row)
            if wanted.average is Average.GROUPS:  # once, whatever sequences and slices it has
                counts[at - 1] = whole and row == members[row][-1] and any(map(self._count, members[row]))
            elif total:
                counts[at - 1] = whole
            if wanted.average is Average.SEQUENCE_MEANS and total:
                weights[here] /= total
        of_all = np.concatenate([np.zeros((0, num_tokens), dtype=np.float32), *columns])
        return LossArrays(*map(torch.from_numpy, (weights, counts, sequence, group, of_all)))

    def _members(self) -> list[list[int]]:
        if not self._groups:
            numbers, positions = self.loss_groups or range(len(self.indices)), dict[int, list[int]]()
            for row, number in enumerate(numbers):
                positions.setdefault(number, []).append(row)
            self._groups.extend(positions[number] for number in numbers)
        return self._groups

    def _read(self, sequence: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of positions ``[start, end)`` of a sequence, with the last one's label, and which of them count."""
        text = self.dataset.tokens(self.indices[sequence], start, end + 1)
        trained = self.dataset.trained(self.indices[sequence], start + 1, end + 1)
        mask = np.ones(end - start, dtype=np.float32) if trained is None else trained.astype(np.float32)
        if self.mask_loss_of is not None:
            mask[text[:-1] == self.mask_loss_of] = 0.0
        return text, mask

    def _counted(self, sequence: int, depths: int) -> Iterator[int]:
        """Yield how many positions of a whole sequence count at each depth of multi-token prediction."""
        if not depths:
            return
        first = self._read(sequence, 0, min(depths, self.lengths[sequence]))[1]
        for depth in range(1, depths + 1):
            yield self._count(sequence) - int(first[:depth].sum())

    def _count(self, sequence: int) -> int:
        if sequence not in self._counts:  # slices would read the whole sequence again and again
            length = self.lengths[sequence]
            masked = self.mask_loss_of is not None or self.dataset.trained(self.indices[sequence], 1, 2) is not None
            self._counts[sequence] = int(self._read(sequence, 0, length)[1].sum()) if masked else length
        return self._counts[sequence]


_OF_PROCESS = ("dataset", "prepared")
_PICKLED = tuple(column.name for column in fields(GlobalBatch) if column.init and column.name not in _OF_PROCESS)


def restored_batch(values: Mapping[str, Any]) -> GlobalBatch:
    """Return a batch that has been pickled, without its dataset and what was prepared."""
    return GlobalBatch(**values, dataset=cast(Any, None))
