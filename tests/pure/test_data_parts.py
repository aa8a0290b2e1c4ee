"""Small parts of the data: samples that are shown, lengths that are drawn, masks of trained tokens, sequences of documents."""

import argparse
import pickle
import re
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_epp.data import sequence_lengths
from megatron_epp.data.chat import example_lines
from megatron_epp.data.indexed_documents import cut_documents, open_mask, stream_lengths
from megatron_epp.plan.errors import EppError
from megatron_epp.tools.cli.lengths import limited
from tests.support.calls import refusal


def decode(ids: Sequence[int]) -> str:
    """Return text whose tokens are lines by their numbers."""
    return "".join(f"line {number}\n" for number in ids)


def lines_of(trained: Sequence[int]) -> list[str]:
    mask = np.array(trained, dtype=np.uint8)
    return example_lines(np.arange(len(mask)), mask, decode)


def test_parts_that_train_are_marked_and_of_long_or_many_parts_the_first_and_last_lines_shown():
    assert lines_of([0, 1, 1]) == [f"{'':9} | line 0\\n", "  trained | line 1\\n", "  trained | line 2\\n"]
    shown = [line.rpartition("| ")[2] for line in lines_of([1] * 20)]
    assert shown == [*(rf"line {number}\n" for number in range(5)), "... 13 lines ...", r"line 18\n", r"line 19\n"]
    shown = lines_of([0, 1] * 20)
    assert [line.rpartition("| ")[2] for line in shown] == [
        *(rf"line {number}\n" for number in range(7)),
        "... 29 parts ...",
        *(rf"line {number}\n" for number in range(36, 40)),
    ]


@pytest.mark.parametrize(
    ("corpus", "median", "longest"),
    [("wikipedia", 344, 269428), ("code", 2200, 1 << 24), ("chat", 700, 1 << 24), ("agents", 630, 1 << 24)],
)
def test_lengths_are_those_of_the_corpus_and_of_the_seed(corpus, median, longest):
    draw = getattr(sequence_lengths, corpus)
    found = draw(20_000, 7)
    assert found.shape == (20_000,)
    assert found.min() >= 1
    assert found.max() <= longest
    assert np.median(found) == pytest.approx(median, rel=0.06)
    assert (found == draw(20_000, 7)).all()
    assert (found != draw(20_000, 8)).any()


def test_articles_files_of_code_chats_and_agents_are_distributed_as_is_documented():
    found = sequence_lengths.wikipedia(400_000, 7)
    for share, length in sequence_lengths.WIKIPEDIA[1:-2]:  # behind them are a few dozen
        assert np.quantile(found, share) == pytest.approx(length, rel=0.1, abs=2)
    found = sequence_lengths.code(20_000, 7)
    assert (found >= 16384).mean() == pytest.approx(0.05 + 0.95 * 0.053, abs=0.01)
    found = sequence_lengths.chat(400_000, 7)
    assert found.mean() == pytest.approx(1280, rel=0.02)
    assert (found > 9000).mean() == pytest.approx(0.01, rel=0.05)
    assert 20 < (found > 40_000).sum() < 80  # as one in 10,000 is
    found = sequence_lengths.agents(20_000, 7)
    assert (found > 5000).mean() == pytest.approx(0.99 / 16, abs=0.01)
    assert np.median(found[found > 5000]) == pytest.approx(60_000, rel=0.15)


VALUES = [0, 1, 1, 0, 0, 1, 0]


def write(folder, values):
    np.asarray(values, dtype=np.uint8).tofile(folder / "corpus.mask")


@pytest.mark.parametrize("mmap", [True, False])
def test_parts_of_a_mask_are_read_as_they_are_and_pickled_without_values(tmp_path, mmap):
    assert open_mask(str(tmp_path / "corpus"), len(VALUES), mmap) is None, "there may be none"
    write(tmp_path, VALUES)
    mask = open_mask(str(tmp_path / "corpus"), len(VALUES), mmap)
    pickled = pickle.dumps(mask)
    assert len(pickled) < 300
    for start, end in [(0, 7), (2, 5), (6, 7), (3, 3)]:
        assert mask.read(start, end).tolist() == pickle.loads(pickled).read(start, end).tolist() == VALUES[start:end]


@pytest.mark.parametrize("num_bytes", [0, 6, 8, 14])
def test_a_mask_of_another_size_is_refused_with_both_numbers(tmp_path, num_bytes):
    write(tmp_path, [0] * num_bytes)
    says = rf"corpus\.mask has {num_bytes} bytes and .*corpus\.bin has 7 tokens, .* remove the mask to train on all tokens"
    assert re.search(says, refusal(open_mask, str(tmp_path / "corpus"), 7))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_value_other_than_0_and_1_is_refused_with_its_token_where_it_is_read(tmp_path, mmap):
    write(tmp_path, [0, 1, 1, 0, 49, 1, 50])
    mask = open_mask(str(tmp_path / "corpus"), 7, mmap)
    assert mask.read(0, 4).tolist() == [0, 1, 1, 0]
    with pytest.raises(EppError, match=r"corpus\.mask has 49 for token 4, where 1 \(trained\) or 0 \(not\) is expected; make"):
        mask.read(2, 7)


def naive(num_tokens, limit, long_documents):
    """Document, first token and positions of every sequence."""
    starts = [(document, range(0, tokens - 1, limit), tokens) for document, tokens in enumerate(num_tokens)]
    most = 1 if long_documents == "truncate" else None
    return [(at, first, min(limit, tokens - 1 - first)) for at, firsts, tokens in starts for first in firsts[:most]]


def random_documents(seed):
    draw = np.random.RandomState(seed)
    return np.maximum(0, draw.randint(-3, 60, size=draw.randint(1, 40))).astype(np.int64)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
@pytest.mark.parametrize("limit", [1, 2, 7, 58, 59, 1000])
def test_sequences_are_the_naive_ones(limit, long_documents):
    for seed in range(20):
        num_tokens = random_documents(seed)
        found = cut_documents(num_tokens, limit, long_documents)
        places = [(*found.locate(i), int(found.lengths[i])) for i in range(len(found))]
        assert places == naive(num_tokens.tolist(), limit, long_documents)
        assert found.num_long == sum(tokens - 1 > limit for tokens in num_tokens)
        assert found.num_left_out == sum(max(0, n - 1) for n in num_tokens) - sum(found.lengths)
        assert found.lengths.dtype == np.int32


def test_an_index_takes_eight_bytes_of_a_document_and_four_of_a_further_sequence_or_of_documents_some_of_which_are_skipped():
    sequences = cut_documents(np.full(1000, 41, dtype=np.int64), 10)
    assert len(sequences) == 4000
    assert sequences.documents is None
    assert sequences.lengths.nbytes + sequences.ends.nbytes == 8 * 1000 + 4 * 3000
    sequences = cut_documents(np.array([1] + [41] * 1000), 60)
    assert sequences.ends is None
    assert sequences.lengths.nbytes + sequences.documents.nbytes == 8 * 1000


def test_a_stream_has_samples_of_one_length_of_all_tokens():
    assert stream_lengths(np.array([5, 0, 8]), 4).tolist() == [4, 4, 4]
    assert stream_lengths(np.array([5, 0, 7]), 4).tolist() == [4, 4]
    with pytest.raises(EppError, match="4 tokens of all documents are less than a sample of 4"):
        stream_lengths(np.array([4]), 4)


def test_commands_plan_a_stream_of_the_documents_as_training_does():
    """Documents of so many positions have a token more each."""
    assert limited((3, 4, 5), argparse.Namespace(context=4, documents="stream")) == (4, 4, 4)
