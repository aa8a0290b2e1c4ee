"""Counts of trained tokens reach the planner with the lengths of a batch, and only if some token is not trained."""

import numpy as np
import pytest

from megatron_epp.data import trained_tokens
from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.data.trained_tokens import PARTS, any_trained, trained_labels, trained_parts
from megatron_epp.plan import EppError
from tests.support.runtime.synthetic_sequences import MemoryDataset

LENGTHS = (40, 5, 100)


def sequences(masks):
    return MemoryDataset(LENGTHS, masks=masks)


def labels_of(sequence, trained):
    """The mask of the tokens of a sequence, of which these labels (positions) are trained; the first token is none."""
    mask = np.zeros(LENGTHS[sequence] + 1, dtype=np.uint8)
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
    asked = []

    class AskedError(Exception):
        pass

    def make(*given):
        asked.append(given)
        raise AskedError

    for masks in ({}, {1: labels_of(1, [2])}):
        batches = PlannedBatches(sequences(masks), iter([(1, 0)]), PlanSource(make))
        with pytest.raises(EppError, match="AskedError"):
            next(batches)
        batches.close()
    assert asked == [((5, 40), (), (), ()), ((5, 40), ((0, 0, 1, 0, 0), (40,)), (), ())]


@pytest.mark.parametrize("block_tokens", [1, 7, 1000])
@pytest.mark.parametrize("limit", [None, 0, 4, 20])
def test_labels_are_counted_by_blocks_of_documents(monkeypatch, block_tokens, limit):
    monkeypatch.setattr(trained_tokens, "_BLOCK_TOKENS", block_tokens)
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
    nothing = labels_of(0, [])
    dataset = sequences({0: nothing, 1: labels_of(1, [2])})
    assert [any_trained(dataset, batch) for batch in ((0,), (0, 1), (2,), (0, 0))] == [False, True, True, False]
    batches = PlannedBatches(dataset, iter([(0,), (0, 1)]))
    assert [next(batches).trains for _ in range(2)] == [False, True]
    batches.close()
