"""Jobs that train and tell of the batches that were consumed: of a batch ahead, chunks are read, too, before training ends."""

import functools
import sys
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from typing import Any

from megatron_epp.data.batch import ChunkArrays, GlobalBatch
from megatron_epp.data.iterator import PlannedBatches
from megatron_epp.mcore import entry


def record_consumed[T](note: Callable[[ChunkArrays], T]) -> Callable[[], list[T]]:
    """Note every chunk that is read from now on; return a function that lists the notes of consumed batches' chunks."""
    notes: dict[tuple[int, ...], list[T]] = defaultdict(list)
    consumed: list[tuple[int, ...]] = []
    chunk_of, following = GlobalBatch.chunk_of, PlannedBatches.__next__

    @functools.wraps(chunk_of)
    def recorded(self: GlobalBatch, *args: Any, **named: Any) -> ChunkArrays:
        arrays = chunk_of(self, *args, **named)
        notes[tuple(self.indices)].append(note(arrays))
        return arrays

    @functools.wraps(following)
    def consuming(self: PlannedBatches) -> GlobalBatch:
        batch = following(self)
        consumed.append(tuple(batch.indices))
        return batch

    GlobalBatch.chunk_of, PlannedBatches.__next__ = recorded, consuming  # type: ignore[method-assign]
    return lambda: [one for batch in consumed for one in notes[batch]]


def train(flags: list[str]) -> None:
    with entry.errors_in_one_line():
        entry.prepare()
        from megatron_epp.mcore.model import gpt

        sys.argv = [sys.argv[0], *flags]
        gpt.pretrain()


def labels(flags: list[str]) -> list[tuple[int, int, float, int]]:
    """Return every token of this rank's chunks with its label, whether that counts, and its position."""

    def rows_of(arrays: ChunkArrays) -> list[tuple[int, int, float, int]]:
        columns = (arrays.tokens, arrays.labels, arrays.loss_mask, arrays.position_ids)
        return list(zip(*(column.tolist() for column in columns), strict=True))

    rows = record_consumed(rows_of)
    train(flags)
    return [*chain(*rows())]


def multiplied(flags: list[str]) -> dict[str, list[int]]:
    """Return the tokens of every chunk that count in the loss, all of every chunk, and those that pass the output layer."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_epp.runtime.loss import token_blocks

    counts = record_consumed(lambda arrays: (int(arrays.loss_mask.sum()), len(arrays.tokens)))
    passed: list[int] = []

    def noting(function: Callable[..., Any], tokens_of: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **named: Any) -> Any:
            x = tokens_of(*args, **named)
            if x is not None and counts():  # not when costs are measured at start-up
                passed.append(len(x))
            return function(*args, **named)

        return noted

    def of_output(layer: Any, input_: Any, *_: Any, **named: Any) -> Any:
        return input_ if "runtime_gather_output" in named else None  # which only the output layer is given

    ColumnParallelLinear.forward = noting(ColumnParallelLinear.forward, of_output)
    token_blocks._summary = noting(token_blocks._summary, lambda x, *_: x)
    train(flags)
    trained, tokens = (list(each) for each in zip(*counts(), strict=True))
    return {"trained": trained, "tokens": tokens, "multiplied": passed}
