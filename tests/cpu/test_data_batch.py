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


NAMES = ("tokens", "labels", "loss_mask", "position_ids")
MASKS = {6: np.arange(51) % 3 == 0, 2: np.array([1, 0, 0, 1], np.uint8), 4: np.zeros(2, np.uint8)}
"""Which tokens of some of the batch's sequences are trained; of the last one all are."""


def naive(batch, chunk, masks):
    """Position by position, as one would write it down: it counts if its label is trained and its input ends no document."""
    rows = []
    for sequence, start, end in batch.plan.chunks[chunk].segments:
        index = batch.indices[sequence]
        for position in range(start, end):
            token = 1000 * index + position
            counts = token != batch.mask_loss_of and (index not in masks or masks[index][position + 1])
            rows.append((token, token + 1, float(counts), position))
    padding = batch.plan.padded_tokens(chunk) - len(rows)
    return rows + [(0, 0, 0.0, position) for position in range(padding)]


@pytest.mark.parametrize("masks", [{}, MASKS], ids=["all trained", "masked"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("kind", CHUNKS)
def test_chunk_arrays_equal_the_naive_ones(kind, multiple, masks):
    batch = batch_with(CHUNKS[kind], multiple, mask_loss_of=6021, masks=masks)
    for chunk in range(len(CHUNKS[kind])):
        arrays = batch.chunk(chunk)
        for name, expected in zip(NAMES, zip(*naive(batch, chunk, masks), strict=True), strict=True):
            column = getattr(arrays, name)
            assert tuple(column.tolist()) == expected
            assert column.dtype == (torch.float32 if name == "loss_mask" else torch.int64)


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


@pytest.mark.parametrize("pieces", [[slice(0, 24)], [slice(0, 12)], [slice(12, 24)], [slice(4, 6), slice(0, 1)]], ids=str)
def test_ranks_that_share_a_chunks_tokens_have_their_pieces_in_order(pieces):
    arrays = batch_with(CHUNKS["hybrid"], multiple=6).chunk(1)
    own = arrays.part(pieces)
    for name in NAMES:
        assert torch.equal(getattr(own, name), torch.cat([getattr(arrays, name)[piece] for piece in pieces]))


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
