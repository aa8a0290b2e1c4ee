"""Arrays of chunks: tokens, labels, loss masks and positions of any segments; and counts of the tokens that are trained."""

import copy
import pickle
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_epp.data import indexed_documents
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.indexed_documents import PARTS, any_trained, trained_labels, trained_parts
from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.plan import EppError, Segment
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
            rows = {name: [] for name in ("tokens", "position_ids", "labels", "shares", "weights")}
            for sequence, start, end in segments:
                whole = wholes[sequence]
                shifted = {
                    name: torch.cat([x[depth:], torch.zeros(depth, dtype=x.dtype)[: len(x)]])
                    for name, x in ((name, getattr(whole, name)) for name in NAMES)
                }
                shares = shifted["loss_mask"] / max(1.0, float(shifted["loss_mask"].sum()))
                shifted |= {"shares": shares, "weights": shares * whole.loss_mask.sum()}
                for name, row in rows.items():
                    row += shifted[name][start:end].tolist()
            for name, row in rows.items():
                own = getattr(ahead, name)[depth - 1].tolist()
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
    dataset, tokens = MemoryDataset([4]), np.arange(5, dtype=np.int64)
    dataset.tokens = lambda index, start=0, end=None: tokens[start:end]
    GlobalBatch(indices=(0,), lengths=(4,), plan=None, dataset=dataset).chunk_of([Segment(0, 0, 4)]).tokens.zero_()
    assert tokens.tolist() == [0, 1, 2, 3, 4]


COUNTED_LENGTHS = (40, 5, 100)


def sequences(masks):
    return MemoryDataset(COUNTED_LENGTHS, masks=masks)


def labels_of(sequence, trained):
    """The mask of the tokens of a sequence, of which these labels (positions) are trained; the first token is none."""
    mask = np.zeros(COUNTED_LENGTHS[sequence] + 1, dtype=np.uint8)
    mask[1 + np.asarray(trained, dtype=np.int64)] = 1
    return mask


def test_parts_count_labels():
    dataset = sequences({0: labels_of(0, range(30, 40)), 1: labels_of(1, [0, 4])})
    first, second, third = trained_parts(dataset, (0, 1, 2))
    assert len(first) == PARTS
    assert (sum(first), sum(first[:12]), max(first[12:])) == (10, 0, 3)
    assert second == (1, 0, 0, 0, 1)
    assert third == (100,)


def test_nothing_is_counted_where_all_are_trained():
    assert trained_parts(sequences({}), (0, 1, 2)) == ()
    assert trained_parts(sequences({0: labels_of(0, range(40))}), (0, 1, 2)) == ()


def test_the_planner_gets_them_with_the_lengths():
    make = Mock(side_effect=LookupError("it was asked"))
    for masks in ({}, {1: labels_of(1, [2])}):
        batches = PlannedBatches(sequences(masks), iter([(1, 0)]), PlanSource(make))
        with pytest.raises(EppError, match="it was asked"):
            next(batches)
        batches.close()
    asked = [call.args[0] for call in make.call_args_list]
    assert asked == [((5, 40), (), (), ()), ((5, 40), ((0, 0, 1, 0, 0), (40,)), (), ())]


@pytest.mark.parametrize("block_tokens", [1, 7, 1000])
@pytest.mark.parametrize("limit", [None, 0, 4, 20])
def test_labels_are_counted_by_blocks_of_documents(monkeypatch, block_tokens, limit):
    monkeypatch.setattr(indexed_documents, "_BLOCK_TOKENS", block_tokens)
    lengths = np.array([3, 0, 9, 1, 0, 6, 12, 2])
    mask = (np.random.RandomState(3).rand(5 + lengths.sum()) < 0.5).astype(np.uint8)
    total = cut = 0
    for end, length in zip(5 + np.cumsum(lengths), lengths, strict=True):
        labels = mask[end - length : end][1:]
        total += labels.sum()
        cut += 0 if limit is None else labels[limit:].sum()
    found = list(trained_labels(lambda start, end: mask[start:end], 5, lengths, limit))
    assert np.sum(found, axis=0).tolist() == [total, cut]
    assert total > cut or limit == 0


def test_a_batch_knows_whether_it_trains_anything():
    dataset = sequences({0: labels_of(0, []), 1: labels_of(1, [2])})
    assert [any_trained(dataset, batch) for batch in ((0,), (0, 1), (2,), (0, 0))] == [False, True, True, False]
    batches = PlannedBatches(dataset, iter([(0,), (0, 1)]))
    assert [next(batches).trains for _ in range(2)] == [False, True]
    batches.close()
