"""Counts of trained tokens reach the planner with the lengths of a batch, and only if some token is not trained."""

import numpy as np
import pytest

from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.data.trained_tokens import PARTS, trained_parts
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
    assert asked == [((5, 40), ()), ((5, 40), ((0, 0, 1, 0, 0), (40,)))]
