"""Global batches: their sampler's order, epochs and resume; and arrays of chunks, with counts of tokens that are trained."""

import copy
import pickle
from dataclasses import replace
from itertools import islice
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.data import indexed_documents, sampler
from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.indexed_documents import PARTS, any_trained, trained_labels, trained_parts
from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.data.sampler import GlobalBatchSampler, TokenBatchSampler, epoch_order, permuted
from megatron_epp.plan import EppError, Segment
from megatron_epp.plan.problem import Lengths
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
    first, second, third = trained_parts(sequences({0: labels_of(0, range(30, 40)), 1: labels_of(1, [0, 4])}), (0, 1, 2))
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
    assert asked == [Lengths((5, 40)), Lengths((5, 40), ((0, 0, 1, 0, 0), (40,)))]


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


SAMPLED = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)


@given(lengths=SAMPLED, batch_tokens=st.integers(1, 3000), least=st.integers(1, 4), seed=st.integers(0, 9))
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


@given(lengths=SAMPLED, batch_tokens=st.integers(1, 200), skipped=st.integers(0, 10))
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
