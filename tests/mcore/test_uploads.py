"""An iteration's inputs come to the device by one copy: those of documents, and of Megatron's own samples."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore.iteration.device_inputs import BatchInputs, RankInputs
from megatron_epp.plan.lowering import lower
from megatron_epp.runtime.attention.context_parallel import ContextParallel
from megatron_epp.runtime.upload import Uploader
from scripts.random_documents import write_documents
from tests.support.mcore.forked import CHANGED, launch, of_ranks
from tests.support.mcore.launch import TINY_ON_DOCUMENTS
from tests.support.runtime.synthetic_sequences import MemoryDataset, plan_of

ITERATIONS = 4
LENGTHS = [30, 3, 2, 17, 9, 30, 12, 1, 24, 5, 31, 11, 25, 7, 12, 20]
SOURCES = {
    "Megatron's samples": "--epp-slices 3 --epp-documents stream",
    "documents, shards of the vocabulary": "--epp-slices 3 --epp-vocab-parallel on",
    "Megatron's schedule on documents": "--epp-schedule packed",
}
CPU = torch.device("cpu")
CHUNKS = [[(0, 0, 8)], [(0, 8, 20), (1, 0, 3)], [(2, 0, 7)]]


def batch_of(dataset: Any) -> GlobalBatch:
    return GlobalBatch(indices=(4, 0, 2), lengths=(20, 3, 7), plan=plan_of((20, 3, 7), CHUNKS, 4), dataset=dataset)


def prepared(batch: GlobalBatch, **needs: Any) -> BatchInputs:
    assert batch.plan is not None
    return RankInputs(Uploader(CPU), **needs).prepare(batch, lower(batch.plan)[0])


DATASET = MemoryDataset([3, 9, 7, 9, 20])


def test_stages_get_the_arrays_and_segment_tables_of_every_chunk_from_one_buffer() -> None:
    batch = batch_of(DATASET)
    made = prepared(batch, rows_of=lambda mask: mask.nonzero().squeeze(1) if len(mask) == 16 else None)
    for chunk in range(3):
        arrays, inputs = batch.chunk(chunk), made.chunk(chunk)
        for name in ("tokens", "position_ids", "labels", "loss_mask"):
            found = getattr(inputs, name)
            assert torch.equal(found, getattr(arrays, name)[None])
            assert found.untyped_storage().data_ptr() == made.upload.buffer.data_ptr()
    assert [made.chunk(chunk).output_share for chunk in range(3)] == [1.0, 15 / 16, 1.0]
    assert made.sequence_ends.tolist() == [0, 20, 23, 30]
    assert made.program.upload is made.upload
    made = prepared(batch_of(DATASET))
    queries, keys = made.program.layouts[1].table.cu_seqlens(CPU)
    assert (queries.tolist(), keys.tolist()) == ([0, 12, 15, 16], [0, 20, 23, 24])
    assert queries.untyped_storage().data_ptr() == made.upload.buffer.data_ptr()


class Halves(ContextParallel):
    rank = 1

    def shards(self, num_tokens: int) -> tuple[tuple[slice, ...], ...]:
        return (slice(0, num_tokens // 2),), (slice(num_tokens // 2, num_tokens),)


def test_context_parallel_ranks_get_their_part_of_a_chunk() -> None:
    batch = batch_of(DATASET)
    made = prepared(batch, context_parallel=Halves(), rows_of=lambda mask: None)
    tokens, labels = made.chunk(1).tokens, made.chunk(1).labels
    assert tokens[0].tolist() == batch.chunk(1).tokens[8:].tolist()
    assert labels[0].tolist() == batch.chunk(1).labels[8:].tolist()


class Unreadable:
    """Sequences whose tokens must not be read."""

    lengths = np.array([3, 9, 7, 9, 20])

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        raise AssertionError("a rank between the first and the last reads no tokens")


def test_ranks_get_what_their_stages_read_and_those_without_ends_segment_tables_alone() -> None:
    made = prepared(batch_of(Unreadable()), reads_tokens=False)
    assert made.chunk(2).tokens is None
    assert len(made.upload.tensors) == 1 + len(CHUNKS)
    first = prepared(batch_of(DATASET)).chunk(0)
    assert first.tokens is not None
    assert (first.labels, first.loss_mask, first.rows) == (None, None, None)
    shard = prepared(batch_of(DATASET), reads_tokens=False, rows_of=lambda mask: None).chunk(0)
    assert (shard.tokens, shard.position_ids) == (None, None)
    assert shard.labels is not None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "corpus", LENGTHS, 120)


def counts(data: str, flags: str) -> tuple[list[dict[str, int]], ...]:
    given = ["--data-path", data, "--split", "100,0,0", "--eval-iters", 0, "--pipeline-model-parallel-size", 2]
    given += ["--calculate-per-token-loss", "--lr-decay-iters", 100, "--train-iters", ITERATIONS, "--epp", *flags.split()]
    return of_ranks(launch(2, CHANGED, "counted", *TINY_ON_DOCUMENTS, *given))


@pytest.mark.parametrize("source", SOURCES)
def test_an_iteration_has_one_upload_and_no_other_copy_to_the_device(data: str, source: str) -> None:
    for rank in counts(data, SOURCES[source]):
        assert all(seen.keys() == {"uploads", "tensors"} for seen in rank), rank
        ahead = [seen["uploads"] - number for number, seen in enumerate(rank, 1)]
        assert set(ahead) <= {0, 1}  # the next batch, which is uploaded while one runs
        assert rank[-1]["tensors"] > 5 * rank[-1]["uploads"]


def test_a_scripts_own_microbatches_are_left_where_they_are(data: str) -> None:
    for rank in counts(data, "--epp-microbatches user"):
        assert rank[-1] == {}
