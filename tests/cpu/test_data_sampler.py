"""The global-batch sampler: order, epochs, resume."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.data import sampler
from megatron_epp.data.iterator import PlannedBatches
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler, epoch_order, permuted
from megatron_epp.plan.errors import EppError
from tests.support.runtime.synthetic_sequences import MemoryDataset


def global_batches(count, num_sequences, batch_size, **options):
    return list(islice(GlobalBatchSampler(num_sequences, batch_size, **options), count))


def flat(batches):
    return [index for batch in batches for index in batch]


def test_order_is_frozen():
    # A checkpoint resumes into this order; changing it breaks every run under way.
    assert epoch_order(10, 1234, 0).tolist() == [3, 8, 6, 4, 9, 1, 5, 2, 0, 7]
    assert epoch_order(10, 1234, 1).tolist() == [3, 9, 7, 6, 4, 1, 8, 2, 5, 0]
    of_many = [161653595, 237677127, 100558641, 468261388, 21065266, 129980819]
    for numbers in (range(6), range(3, 6)):
        assert permuted(np.array(numbers), 500_000_000, 1234, 0).tolist() == [of_many[number] for number in numbers]


@pytest.mark.parametrize("num_sequences", [2, 3, 17, 1000, 1025, 4097])
def test_entries_computed_one_by_one_are_a_permutation(num_sequences):
    for seed in range(3):
        assert sorted(permuted(np.arange(num_sequences), num_sequences, seed, 0)) == list(range(num_sequences))


def test_every_place_of_a_computed_permutation_has_every_sequence_about_as_often():
    counts = np.zeros((8, 8))
    for seed in range(4000):
        counts[np.arange(8), permuted(np.arange(8), 8, seed)] += 1
    assert counts.min() > 400
    assert counts.max() < 600
    neighbours = permuted(np.arange(10_000), 10_000_000, 7)
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.05


def test_many_sequences_are_drawn_in_the_computed_order_across_epochs(monkeypatch):
    monkeypatch.setattr(sampler, "_LARGE", 5)
    drawn = flat(global_batches(3, 6, 4, seed=1))
    assert drawn == [*permuted(np.arange(6), 6, 1, 0), *permuted(np.arange(6), 6, 1, 1)]
    assert flat(global_batches(2, 6, 4, seed=1, consumed_samples=4)) == drawn[4:]
    assert flat(global_batches(2, 6, 4, shuffle=False)) == [0, 1, 2, 3, 4, 5, 0, 1]


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**40), st.integers(1, 4), st.booleans())
def test_every_epoch_holds_each_sequence_once(num_sequences, batch_size, seed, num_epochs, shuffle):
    count = -(-num_epochs * num_sequences // batch_size)
    drawn = flat(global_batches(count, num_sequences, batch_size, seed=seed, shuffle=shuffle))
    assert len(drawn) == count * batch_size
    for epoch in range(num_epochs):
        assert sorted(drawn[epoch * num_sequences : (epoch + 1) * num_sequences]) == list(range(num_sequences))


@given(num_sequences=st.integers(1, 60), batch_size=st.integers(1, 40), skipped=st.integers(0, 20))
def test_resume_from_consumed_samples_continues_exactly(num_sequences, batch_size, skipped):
    uninterrupted = global_batches(skipped + 8, num_sequences, batch_size, seed=3)
    resumed = global_batches(8, num_sequences, batch_size, seed=3, consumed_samples=skipped * batch_size)
    assert resumed == uninterrupted[skipped:]


def test_epochs_and_seeds_differ_and_repeat():
    by_seed = {seed: flat(global_batches(2, 100, 100, seed=seed)) for seed in (1, 2)}
    assert by_seed[1] != by_seed[2]
    assert by_seed[1][:100] != by_seed[1][100:]
    assert by_seed[1] == flat(global_batches(2, 100, 100, seed=1))


@pytest.mark.parametrize(("arguments", "says"), [((0, 4), "the dataset is empty"), ((10, 0), "a global batch of 0 sequences")])
def test_impossible_requests_are_refused(arguments, says):
    with pytest.raises(EppError, match=says):
        GlobalBatchSampler(*arguments)


def test_a_seed_may_be_any_integer():
    for seed in (2**32 - 1, 2**40 + 7, 2**63, -5):
        assert sorted(epoch_order(10, seed, 0)) == list(range(10))
    assert epoch_order(100, 2**32 + 1, 0).tolist() == epoch_order(100, 1, 0).tolist()
    assert epoch_order(3, 1).dtype == "uint32"


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)


@given(lengths=LENGTHS, batch_tokens=st.integers(1, 3000), least=st.integers(1, 4), seed=st.integers(0, 9))
def test_the_order_is_that_of_batches_of_sequences_and_no_batch_could_take_more(lengths, batch_tokens, least, seed):
    batches, at = list(islice(TokenBatchSampler(lengths, batch_tokens, least, seed=seed), 6)), 0
    order = next(GlobalBatchSampler(len(lengths), sum(map(len, batches)) + 1, seed=seed))
    assert tuple(flat(batches)) == order[:-1]
    for batch in batches:
        at += len(batch)
        num_tokens = int(lengths[list(batch)].sum())
        assert len(batch) >= least
        assert len(batch) == least or num_tokens <= batch_tokens
        assert num_tokens + lengths[order[at]] > batch_tokens


@given(lengths=LENGTHS, batch_tokens=st.integers(1, 200), skipped=st.integers(0, 10))
def test_batches_of_tokens_resume_from_consumed_samples_exactly(lengths, batch_tokens, skipped):
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
