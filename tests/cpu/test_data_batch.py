"""Chunk arrays: tokens, labels, loss mask and positions of any list of segments."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_epp.data.batch import ChunkArrays, GlobalBatch
from megatron_epp.plan import Segment
from tests.support.runtime.synthetic_sequences import MemoryDataset, plan_of

LENGTHS = (50, 3, 1, 7)
INDICES = (6, 2, 4, 0)  # of the batch's sequences in the dataset

CHUNKS = {
    "batched": [[(1, 0, 3), (2, 0, 1), (3, 0, 7)], [(0, 0, 50)]],
    "split": [[(0, 0, 20)], [(0, 20, 37)], [(0, 37, 50)], [(1, 0, 3), (2, 0, 1), (3, 0, 7)]],
    "hybrid": [[(0, 0, 30)], [(0, 30, 50), (3, 0, 7), (1, 0, 3)], [(2, 0, 1)]],
}


def batch_with(chunks, multiple=1, mask_loss_of=None, masks=None):
    by_index = dict(zip(INDICES, LENGTHS, strict=True))
    dataset = MemoryDataset([by_index.get(index, 9) for index in range(8)], masks=masks)
    plan = plan_of(LENGTHS, chunks, multiple)
    return GlobalBatch(indices=INDICES, lengths=LENGTHS, plan=plan, dataset=dataset, mask_loss_of=mask_loss_of)


def naive(batch, chunk):
    """Position by position, as one would write it down."""
    rows = []
    for sequence, start, end in batch.plan.chunks[chunk].segments:
        for position in range(start, end):
            token = 1000 * batch.indices[sequence] + position
            rows.append((token, token + 1, 0.0 if token == batch.mask_loss_of else 1.0, position))
    padding = batch.plan.padded_tokens(chunk) - len(rows)
    return rows + [(0, 0, 0.0, position) for position in range(padding)]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", CHUNKS)
def test_chunk_arrays_equal_the_naive_ones(kind, multiple):
    batch = batch_with(CHUNKS[kind], multiple, mask_loss_of=6021)
    for chunk in range(len(CHUNKS[kind])):
        arrays = batch.chunk(chunk)
        tokens, labels, loss_mask, position_ids = (list(column) for column in zip(*naive(batch, chunk), strict=True))
        assert arrays.tokens.tolist() == tokens
        assert arrays.labels.tolist() == labels
        assert arrays.loss_mask.tolist() == loss_mask
        assert arrays.position_ids.tolist() == position_ids


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", CHUNKS)
def test_what_lies_ahead_is_the_whole_sequence_shifted_however_it_is_cut(kind, masked, multiple):
    masks = {index: np.random.default_rng(index).integers(0, 2, 60) for index in range(8)} if masked else None
    batch, depths = batch_with(CHUNKS[kind], multiple, 6021, masks), 3
    wholes = {s: batch.chunk_of([Segment(s, 0, length)]) for s, length in enumerate(LENGTHS)}
    for chunk, segments in enumerate(CHUNKS[kind]):
        ahead = batch.chunk(chunk, depths).ahead
        assert ahead.weights.shape == (depths, batch.plan.padded_tokens(chunk))
        for depth in range(1, depths + 1):
            rows = [[], [], [], [], []]
            for sequence, start, end in segments:
                whole, none = wholes[sequence], torch.zeros(depth)
                shifted = [
                    torch.cat([x[depth:], none[: len(x)].to(x.dtype)]) for x in (whole.tokens, whole.position_ids, whole.labels)
                ]
                mask = torch.cat([whole.loss_mask[depth:], none[: len(whole.loss_mask)]])
                shares = mask / max(1.0, float(mask.sum()))
                for row, values in zip(rows, (*shifted, shares, shares * whole.loss_mask.sum()), strict=True):
                    row += values[start:end].tolist()
            for found, row in zip(
                (ahead.tokens, ahead.position_ids, ahead.labels, ahead.shares, ahead.weights), rows, strict=True
            ):
                own = found[depth - 1].tolist()
                assert own[: len(row)] == pytest.approx(row)
                assert not any(own[len(row) :])


def test_types_and_shapes_are_what_the_plan_announces():
    batch = batch_with(CHUNKS["hybrid"], multiple=16)
    arrays = batch.chunk(1)
    assert arrays.tokens.shape == (batch.plan.padded_tokens(1),) == (32,)
    assert [x.dtype for x in (arrays.tokens, arrays.labels, arrays.loss_mask, arrays.position_ids)] == [
        torch.int64,
        torch.int64,
        torch.float32,
        torch.int64,
    ]


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_ranks_that_share_a_chunks_tokens_have_them_in_order_the_same_number_each(parts):
    arrays = batch_with(CHUNKS["hybrid"], multiple=6).chunk(1)
    own = len(arrays.tokens) // parts
    shares = [arrays.part([slice(index * own, (index + 1) * own)]) for index in range(parts)]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        pieces = [getattr(share, name) for share in shares]
        assert len({len(piece) for piece in pieces}) == 1
        assert torch.equal(torch.cat(pieces), getattr(arrays, name))


def test_a_rank_may_have_several_pieces_of_a_chunk():
    arrays = batch_with(CHUNKS["hybrid"], multiple=6).chunk(1)
    own = arrays.part([slice(4, 6), slice(0, 1)])
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert getattr(own, name).tolist() == [getattr(arrays, name)[at] for at in (4, 5, 0)]


MASKS = {6: np.arange(51) % 3 == 0, 2: np.array([1, 0, 0, 1], np.uint8), 4: np.zeros(2, np.uint8)}
"""Which tokens of some of the batch's sequences are trained; of the last one all are."""


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", CHUNKS)
def test_a_position_counts_if_its_label_is_trained_and_its_input_ends_no_document(kind, multiple):
    plain = batch_with(CHUNKS[kind], multiple, mask_loss_of=6021)
    masked = batch_with(CHUNKS[kind], multiple, mask_loss_of=6021, masks=MASKS)
    for chunk in range(len(CHUNKS[kind])):
        before, after = plain.chunk(chunk), masked.chunk(chunk)
        expected = []
        for label, counts in zip(before.labels.tolist(), before.loss_mask.tolist(), strict=True):
            sequence, position = divmod(label, 1000)
            expected.append(counts * float(MASKS[sequence][position]) if sequence in MASKS else counts)
        assert after.loss_mask.tolist() == expected
        assert after.loss_mask.dtype == torch.float32
        for name in ("tokens", "labels", "position_ids"):
            assert torch.equal(getattr(after, name), getattr(before, name))


def test_batches_survive_copy_and_pickle():
    # Megatron's rerun machine copies every batch and may put it into a checkpoint.
    batch = batch_with(CHUNKS["hybrid"])
    assert copy.copy(batch) is batch
    twin = pickle.loads(pickle.dumps(batch))
    assert twin == batch
    assert twin.dataset is None  # another process opens its own
    assert torch.equal(replace(twin, dataset=batch.dataset).chunk(1).labels, batch.chunk(1).labels)


def test_arrays_do_not_alias_the_dataset():
    tokens = np.arange(5, dtype=np.int64)

    class Fixed(MemoryDataset):
        def tokens(self, index, start=0, end=None):
            return tokens[start:end]

    arrays: ChunkArrays = GlobalBatch(indices=(0,), lengths=(4,), plan=None, dataset=Fixed([4])).chunk_of([Segment(0, 0, 4)])
    arrays.tokens.zero_()
    assert tokens.tolist() == [0, 1, 2, 3, 4]
