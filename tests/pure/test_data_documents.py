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


def test_a_stream_has_samples_of_one_length_of_all_tokens():
    assert stream_lengths(np.array([5, 0, 8]), 4).tolist() == [4, 4, 4]
    assert stream_lengths(np.array([5, 0, 7]), 4).tolist() == [4, 4]
    with pytest.raises(EppError, match="4 tokens of all documents are less than a sample of 4"):
        stream_lengths(np.array([4]), 4)


def test_commands_plan_a_stream_of_the_documents_as_training_does():
    """Documents of so many positions have a token more each."""
    asked = argparse.Namespace(context=4, documents="stream")
    assert limited((3, 4, 5), asked) == (4, 4, 4)
