"""Batches of a number of tokens: which sequences they have, and where a resumed run goes on."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.data.iterator import PlannedBatches
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler
from tests.support.runtime.synthetic_sequences import MemoryDataset

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)


def test_sequences_are_taken_until_the_next_would_be_too_much():
    batches = TokenBatchSampler(np.array([4, 3, 2, 9, 1, 1]), 9, shuffle=False)
    assert list(islice(batches, 4)) == [(0, 1, 2), (3,), (4, 5, 0, 1), (2,)]


def test_every_replica_gets_a_sequence_however_long_they_are():
    batches = TokenBatchSampler(np.array([40, 30, 2, 9, 1]), 9, least=2, shuffle=False)
    assert list(islice(batches, 3)) == [(0, 1), (2, 3), (4, 0)]


@given(lengths=LENGTHS, batch_tokens=st.integers(1, 3000), least=st.integers(1, 4), seed=st.integers(0, 9))
def test_the_order_is_that_of_batches_of_sequences_and_no_batch_could_take_more(lengths, batch_tokens, least, seed):
    batches = list(islice(TokenBatchSampler(lengths, batch_tokens, least, seed=seed), 6))
    taken = [index for batch in batches for index in batch]
    expected = GlobalBatchSampler(len(lengths), len(taken) + 1, seed=seed)
    order = next(expected)
    assert tuple(taken) == order[:-1]
    at = 0
    for batch in batches:
        at += len(batch)
        num_tokens = int(lengths[list(batch)].sum())
        assert len(batch) >= least
        assert len(batch) == least or num_tokens <= batch_tokens
        assert num_tokens + lengths[order[at]] > batch_tokens


@given(lengths=LENGTHS, batch_tokens=st.integers(1, 200), skipped=st.integers(0, 10))
def test_resume_from_consumed_samples_continues_exactly(lengths, batch_tokens, skipped):
    whole = TokenBatchSampler(lengths, batch_tokens)
    for _ in range(skipped):
        next(whole)
    resumed = TokenBatchSampler(lengths, batch_tokens, consumed_samples=whole.consumed_samples)
    assert list(islice(resumed, 5)) == list(islice(whole, 5))


@pytest.mark.parametrize("consumed", [0, 7])
def test_a_batch_knows_how_many_sequences_there_have_been(consumed):
    dataset = MemoryDataset([4, 3, 2, 9, 1, 1])
    batches = PlannedBatches(dataset, TokenBatchSampler(dataset.lengths, 9, 1, consumed))
    expected = consumed
    for _ in range(5):
        batch = next(batches)
        expected += batch.global_size
        assert batch.consumed_samples == expected
    batches.close()
