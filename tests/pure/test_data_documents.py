"""Sequences that documents make under a limit, against the same written down token by token."""

import argparse

import numpy as np
import pytest

from megatron_epp.cli.lengths import limited
from megatron_epp.data.indexed_documents import sequences_of, stream_lengths
from megatron_epp.plan.errors import EppError


def naive(num_tokens, limit, long_documents):
    """Document, first token and positions of every sequence."""
    found = []
    for document, tokens in enumerate(num_tokens):
        for first in range(0, tokens - 1, limit):
            found.append((document, first, min(limit, tokens - 1 - first)))
            if long_documents == "truncate":
                break
    return found


def random_documents(seed, longest=60):
    draw = np.random.RandomState(seed)
    return np.maximum(0, draw.randint(-3, longest, size=draw.randint(1, 40))).astype(np.int64)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
@pytest.mark.parametrize("limit", [1, 2, 7, 58, 59, 1000])
def test_sequences_are_the_naive_ones(limit, long_documents):
    for seed in range(20):
        num_tokens = random_documents(seed)
        found = sequences_of(num_tokens, limit, long_documents)
        places = [(*found.locate(i), int(found.lengths[i])) for i in range(len(found))]
        assert places == naive(num_tokens.tolist(), limit, long_documents)
        assert found.num_long == sum(tokens - 1 > limit for tokens in num_tokens)
        assert found.num_left_out == sum(max(0, n - 1) for n in num_tokens) - sum(found.lengths)
        assert found.lengths.dtype == np.int32


@pytest.mark.parametrize("limit", [1, 3, 8, 100])
def test_split_documents_have_every_token_but_the_first_as_a_label_once(limit):
    for seed in range(20):
        num_tokens = random_documents(seed)
        found = sequences_of(num_tokens, limit)
        seen = [np.zeros(n, dtype=int) for n in num_tokens]
        for sequence, length in enumerate(found.lengths.tolist()):
            document, first = found.locate(sequence)
            seen[document][first + 1 : first + length + 1] += 1
        assert [counts.tolist() for counts in seen] == [[0, *[1] * (n - 1)][:n] for n in num_tokens]


def test_a_sequence_begins_with_the_last_label_of_the_one_before():
    found = sequences_of(np.array([10]), 4)
    assert [found.locate(i) for i in range(len(found))] == [(0, 0), (0, 4), (0, 8)]
    assert found.lengths.tolist() == [4, 4, 1]


def test_truncating_counts_the_tokens_that_it_leaves_out():
    found = sequences_of(np.array([10, 5, 1, 6]), 4, "truncate")
    assert found.lengths.tolist() == [4, 4, 4]
    assert (found.num_long, found.num_left_out) == (2, 5 + 1)


def test_where_all_documents_fit_both_ways_are_the_same():
    num_tokens = random_documents(3)
    ways = [sequences_of(num_tokens, 60, way) for way in ("split", "truncate")]
    assert ways[0].lengths.tolist() == ways[1].lengths.tolist()
    assert [way.ends for way in ways] == [None, None]
    assert [way.num_left_out for way in ways] == [0, 0]


def test_an_index_takes_eight_bytes_of_a_document_and_four_of_a_further_sequence_or_of_documents_some_of_which_are_skipped():
    sequences = sequences_of(np.full(1000, 41, dtype=np.int64), 10)
    assert len(sequences) == 4000
    assert sequences.documents is None
    assert sequences.lengths.nbytes + sequences.ends.nbytes == 8 * 1000 + 4 * 3000
    sequences = sequences_of(np.array([1] + [41] * 1000), 60)
    assert sequences.ends is None
    assert sequences.lengths.nbytes + sequences.documents.nbytes == 8 * 1000


def test_documents_that_train_nothing_make_no_sequence():
    assert len(sequences_of(np.array([0, 1, 1, 0]), 5)) == 0


def test_a_stream_has_samples_of_one_length_of_all_tokens():
    assert stream_lengths(np.array([5, 0, 8]), 4).tolist() == [4, 4, 4]
    assert stream_lengths(np.array([5, 0, 7]), 4).tolist() == [4, 4]
    with pytest.raises(EppError, match="4 tokens of all documents are less than a sample of 4"):
        stream_lengths(np.array([4]), 4)


def test_commands_plan_a_stream_of_the_documents_as_training_does():
    """Documents of so many positions have a token more each."""
    asked = argparse.Namespace(context=4, documents="stream")
    assert limited((3, 4, 5), asked) == (4, 4, 4)
