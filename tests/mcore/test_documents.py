"""Documents in Megatron's indexed files: reading them, and refusing broken ones."""

import argparse
import logging
import os

import numpy as np
import pytest

from megatron_epp.cli.lengths import lengths_of
from megatron_epp.data.indexed_documents import LONG_DOCUMENTS
from megatron_epp.mcore.data.document_dataset import DocumentDataset
from megatron_epp.mcore.data.document_file import DocumentFile
from megatron_epp.plan.errors import EppError
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

DOCUMENTS = documents_of(long_tailed_lengths(60, longest=2000))


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path / "corpus", DOCUMENTS)


# One document, one sequence, or as many as it fills


@pytest.mark.parametrize("num_sentences", [1, 3, 7])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_document_is_a_sequence_however_many_sentences_it_has(tmp_path, num_sentences, dtype, mmap):
    prefix = write_pair(tmp_path / "corpus", DOCUMENTS, num_sentences, dtype)
    dataset = DocumentDataset(DocumentFile(prefix, mmap), context_limit=10**6)
    assert dataset.lengths.tolist() == [len(document) - 1 for document in DOCUMENTS]
    for index, document in enumerate(DOCUMENTS):
        assert dataset.tokens(index).tolist() == document.tolist()


@pytest.mark.parametrize("limit", [1, 40, 300])
def test_longer_documents_are_split_and_every_token_but_their_first_is_a_label_once(pair, limit):
    dataset = DocumentDataset(pair, context_limit=limit)
    assert dataset.num_long == sum(len(document) > limit + 1 for document in DOCUMENTS) > 0
    assert dataset.num_left_out == 0
    sequences = [dataset.tokens(i).tolist() for i in range(len(dataset))]
    assert [len(sequence) - 1 for sequence in sequences] == dataset.lengths.tolist()
    assert max(dataset.lengths) == limit
    labels = [label for sequence in sequences for label in sequence[1:]]
    assert labels == [label for document in DOCUMENTS for label in document[1:]]
    inputs = [token for sequence in sequences for token in sequence[:-1]]
    assert inputs == [token for document in DOCUMENTS for token in document[:-1]]
    for index, sequence in enumerate(sequences):
        assert dataset.tokens(index, len(sequence) // 2, len(sequence)).tolist() == sequence[len(sequence) // 2 :]


def test_truncated_documents_are_cut_to_the_context_limit(pair):
    dataset = DocumentDataset(pair, context_limit=40, long_documents="truncate")
    assert dataset.num_long == sum(len(document) > 41 for document in DOCUMENTS) > 0
    assert dataset.lengths.tolist() == [min(len(document) - 1, 40) for document in DOCUMENTS]
    longest = int(np.argmax([len(document) for document in DOCUMENTS]))
    assert dataset.tokens(longest).tolist() == DOCUMENTS[longest][:41].tolist()


@pytest.mark.parametrize(("num_tokens", "lengths", "num_long"), [(41, [40], 0), (42, [40, 1], 1)])
def test_a_document_of_one_token_more_than_the_limit_is_whole(tmp_path, num_tokens, lengths, num_long):
    dataset = DocumentDataset(write_pair(tmp_path / "corpus", documents_of([num_tokens])), context_limit=40)
    assert (dataset.lengths.tolist(), dataset.num_long) == (lengths, num_long)


@pytest.mark.parametrize("long_documents", LONG_DOCUMENTS)
def test_commands_see_the_lengths_that_training_sees(pair, long_documents):
    dataset = DocumentDataset(pair, context_limit=40, long_documents=long_documents)
    asked = argparse.Namespace(lengths=f"{pair}.idx", batch_size=None, context=40, documents=long_documents)
    assert lengths_of(asked) == tuple(dataset.lengths.tolist())


def test_documents_that_train_nothing_are_skipped_counted_and_logged_once(tmp_path, caplog):
    documents = documents_of([0, 5, 1, 0, 2, 0, 30, 1])
    prefix = write_pair(tmp_path / "corpus", documents, num_sentences=2)
    with caplog.at_level(logging.INFO, logger="megatron_epp"):
        dataset = DocumentDataset(prefix, context_limit=20)
    assert dataset.num_skipped == 5
    assert dataset.lengths.tolist() == [4, 1, 20, 9]
    assert [dataset.tokens(i).tolist() for i in range(4)] == [
        documents[1].tolist(),
        documents[4].tolist(),
        documents[6][:21].tolist(),
        documents[6][20:].tolist(),
    ]
    (line,) = said(caplog, logging.INFO)
    assert "3 documents are 4 sequences, 5 skipped (fewer than 2 tokens), 1 longer than --seq-length 20 split" in line
    assert "min 1, median 6, max 20" in line
    (warning,) = said(caplog, logging.WARNING)
    assert "1 of 8 documents are longer than --seq-length 20 and become several sequences" in warning


def said(caplog, level):
    return [r.getMessage() for r in caplog.records if r.name.startswith("megatron_epp") and r.levelno == level]


def test_truncating_warns_of_the_tokens_and_the_share_that_it_leaves_out(tmp_path, caplog):
    prefix = write_pair(tmp_path / "corpus", documents_of([1000, 5, 121, 1500]))
    with caplog.at_level(logging.INFO, logger="megatron_epp"):
        dataset = DocumentDataset(prefix, context_limit=120, long_documents="truncate")
    assert dataset.num_left_out == 879 + 1379
    (line,) = said(caplog, logging.WARNING)
    assert "--epp-documents truncate leaves out 2,258 of 2,626 tokens (86.0%), what 2 documents have" in line
    DocumentDataset(prefix, context_limit=1499, long_documents="truncate")
    assert said(caplog, logging.WARNING) == [line]


def test_lengths_are_known_without_reading_tokens(pair):
    size = os.path.getsize(f"{pair}.bin")
    os.truncate(f"{pair}.bin", 0)
    os.truncate(f"{pair}.bin", size)  # as long as before, with nothing in it
    dataset = DocumentDataset(pair, context_limit=10**6, vocab_size=1)
    assert dataset.lengths.tolist() == [len(document) - 1 for document in DOCUMENTS]


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(pair):
    dataset = DocumentDataset(pair, context_limit=10**6, vocab_size=257)
    assert len(dataset.tokens(0))
    longest = int(np.argmax(dataset.lengths))
    with pytest.raises(EppError, match=r"corpus has token \d+, and this run's tokenizer has a vocabulary of 100"):
        DocumentDataset(pair, context_limit=10**6, vocab_size=100).tokens(longest)


# Broken files


def overwrite(path, offset, data):
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def append(path, data):
    with open(path, "ab") as stream:
        stream.write(data)


BREAKAGES = {
    "no index": (lambda p: os.remove(f"{p}.idx"), r"there is no file .*corpus\.idx; --data-path takes prefixes"),
    "no bin": (lambda p: os.remove(f"{p}.bin"), r"there is no file .*corpus\.bin"),
    "index without an end": (lambda p: os.truncate(f"{p}.idx", 200), r"corpus\.idx is truncated: 200 bytes where its header"),
    "index cut in its header": (lambda p: os.truncate(f"{p}.idx", 20), r"corpus\.idx is truncated: 20 bytes, less than"),
    "empty index": (lambda p: os.truncate(f"{p}.idx", 0), r"corpus\.idx is empty"),
    "text as index": (lambda p: overwrite(f"{p}.idx", 0, b'{"text": "hello"}'), "is not a Megatron index"),
    "tokens that are no integers": (lambda p: as_type(p, np.int32, b"\x07"), "token type 7, whose tokens are no integers"),
    "negative tokens": (lambda p: as_type(p, np.uint16, b"\x03", [9, 40000]), "has token -25,536, .*after 1 tokens of"),
    "unknown token type": (lambda p: overwrite(f"{p}.idx", 17, b"\x63"), "token type 99"),
    "index with a tail": (lambda p: append(f"{p}.idx", b"x" * 7), "is too long"),
    "bin too short": (lambda p: os.truncate(f"{p}.bin", 100), r"corpus\.bin has 100 bytes but .*corpus\.idx describes \d+"),
    "bin too long": (lambda p: append(f"{p}.bin", b"xx"), "they are not a pair or the .bin is incomplete"),
    "empty bin": (lambda p: os.truncate(f"{p}.bin", 0), r"corpus\.bin is empty"),
    "negative length": (lambda p: overwrite(f"{p}.idx", 34, b"\xff\xff\xff\xff"), "contradicts itself"),
    "wrong boundary": (lambda p: append_boundary(p, 10**6), "contradicts itself: document 59 ends before sequence 1000000"),
    "boundaries that wrap around": (lambda p: wrap_boundaries(p), "contradicts itself: document 1 begins at sequence 92233"),
    "another corpus's index": (lambda p: swap_index(p), r"but .*corpus\.idx describes"),
    "no documents": (lambda p: write_pair(p, []), "holds no documents"),
    "only empty documents": (lambda p: write_pair(p, documents_of([0, 0])), r"corpus\.bin is empty"),
    "only short documents": (
        lambda p: write_pair(p, documents_of([1, 0, 1])),
        r"all 3 train documents of .* fewer than 2 tokens",
    ),
}


def as_type(prefix, dtype, code, document=(1, 2, 3)):
    """Write a document whose index has another type of as many bytes."""
    write_pair(prefix, [np.array(document)], dtype=dtype)
    overwrite(f"{prefix}.idx", 17, code)


def append_boundary(prefix, boundary):
    overwrite(f"{prefix}.idx", os.path.getsize(f"{prefix}.idx") - 8, np.int64(boundary).tobytes())


def wrap_boundaries(prefix):
    """Write boundaries whose differences, in 64 bits, are all positive."""
    write_pair(prefix, documents_of([5, 5, 5]))
    start = os.path.getsize(f"{prefix}.idx") - 3 * 8
    overwrite(f"{prefix}.idx", start, np.array([2**63 - 1, -5], np.int64).tobytes())


def swap_index(prefix):
    other = write_pair(f"{prefix}-other", documents_of([7, 8, 9]))
    os.replace(f"{other}.idx", f"{prefix}.idx")


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_pair_is_refused_in_two_lines_at_most(pair, breakage):
    break_it, says = BREAKAGES[breakage]
    break_it(pair)
    with pytest.raises(EppError, match=says) as caught:
        DocumentDataset(pair, context_limit=100, vocab_size=50_000).tokens(0)
    assert str(caught.value).count("\n") <= 1
    assert len(str(caught.value)) < 400
