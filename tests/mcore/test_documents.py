"""Documents in Megatron's indexed files: reading, refusing broken ones, splits, blends, iterators."""

import logging
import os
import pickle
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine
from synthetic_documents import documents_of, long_tailed_lengths, write_pair

from megatron_epp.data.sampler import GlobalBatchSampler
from megatron_epp.mcore.document_dataset import DocumentDataset, DocumentFile, concatenate, weighted
from megatron_epp.mcore.documents import build_document_iterators, build_splits
from megatron_epp.schedule.errors import EppError

DOCUMENTS = documents_of(long_tailed_lengths(60, longest=2000))


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path / "corpus", DOCUMENTS)


# One document, one sequence


@pytest.mark.parametrize("num_sentences", [1, 3, 7])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_document_is_a_sequence_however_many_sentences_it_has(tmp_path, num_sentences, dtype, mmap):
    prefix = write_pair(tmp_path / "corpus", DOCUMENTS, num_sentences, dtype)
    dataset = DocumentDataset(DocumentFile(prefix, mmap), context_limit=10**6)
    assert dataset.lengths.tolist() == [len(document) - 1 for document in DOCUMENTS]
    for index, document in enumerate(DOCUMENTS):
        assert dataset.tokens(index).tolist() == document.tolist()
        assert dataset.tokens(index, 1, len(document)).tolist() == document[1:].tolist()


def test_documents_built_sentence_by_sentence_are_read_alike(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32)
    for sentences in ([[1, 2, 3], [4]], [[5], [6], [7, 8]]):
        for sentence in sentences:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(str(tmp_path / "corpus.idx"))
    dataset = DocumentDataset(str(tmp_path / "corpus"), context_limit=100)
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_longer_documents_are_cut_to_the_context_limit(pair):
    dataset = DocumentDataset(pair, context_limit=40)
    assert dataset.num_truncated == sum(len(document) > 41 for document in DOCUMENTS) > 0
    assert dataset.lengths.tolist() == [min(len(document) - 1, 40) for document in DOCUMENTS]
    longest = int(np.argmax([len(document) for document in DOCUMENTS]))
    assert dataset.tokens(longest).tolist() == DOCUMENTS[longest][:41].tolist()


@pytest.mark.parametrize(("num_tokens", "truncated"), [(41, 0), (42, 1)])
def test_a_document_of_one_token_more_than_the_limit_is_whole(tmp_path, num_tokens, truncated):
    dataset = DocumentDataset(write_pair(tmp_path / "corpus", documents_of([num_tokens])), context_limit=40)
    assert (dataset.lengths.tolist(), dataset.num_truncated) == ([40], truncated)


def test_documents_that_train_nothing_are_skipped_counted_and_logged_once(tmp_path, caplog):
    documents = documents_of([0, 5, 1, 0, 2, 0, 30, 1])
    prefix = write_pair(tmp_path / "corpus", documents, num_sentences=2)
    with caplog.at_level(logging.INFO, logger="megatron_epp"):
        dataset = DocumentDataset(prefix, context_limit=20)
    assert dataset.num_skipped == 5
    assert dataset.lengths.tolist() == [4, 1, 20]
    assert [dataset.tokens(i).tolist() for i in range(3)] == [
        documents[1].tolist(),
        documents[4].tolist(),
        documents[6][:21].tolist(),
    ]
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_epp")]
    assert "3 documents, 5 skipped (fewer than 2 tokens), 1 truncated to --seq-length 20" in line
    assert "min 1, median 4, max 20" in line


def test_lengths_are_known_without_reading_tokens(pair):
    size = os.path.getsize(f"{pair}.bin")
    with open(f"{pair}.bin", "wb") as stream:
        stream.truncate(size)  # as long as before, with nothing in it
    dataset = DocumentDataset(pair, context_limit=100)
    assert dataset.lengths.tolist() == [min(len(document) - 1, 100) for document in DOCUMENTS]


# Broken files


def truncate(path, num_bytes):
    with open(path, "r+b") as stream:
        stream.truncate(num_bytes)


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
    "index without an end": (lambda p: truncate(f"{p}.idx", 200), r"corpus\.idx is truncated: 200 bytes where its header"),
    "index cut in its header": (lambda p: truncate(f"{p}.idx", 20), r"corpus\.idx is truncated: 20 bytes, not even a header"),
    "empty index": (lambda p: truncate(f"{p}.idx", 0), r"corpus\.idx is not a Megatron index"),
    "text as index": (lambda p: overwrite(f"{p}.idx", 0, b'{"text": "hello"}'), "is not a Megatron index"),
    "unknown token type": (lambda p: overwrite(f"{p}.idx", 17, b"\x63"), "token type 99"),
    "index with a tail": (lambda p: append(f"{p}.idx", b"x" * 7), "has too much in it"),
    "bin too short": (lambda p: truncate(f"{p}.bin", 100), r"corpus\.bin has 100 bytes but .*corpus\.idx describes \d+"),
    "bin too long": (lambda p: append(f"{p}.bin", b"xx"), "they are not a pair or the .bin is incomplete"),
    "empty bin": (lambda p: truncate(f"{p}.bin", 0), r"corpus\.bin is empty"),
    "negative length": (lambda p: overwrite(f"{p}.idx", 34, b"\xff\xff\xff\xff"), "contradicts itself"),
    "wrong boundary": (lambda p: append_boundary(p, 10**6), "contradicts itself"),
    "another corpus's index": (lambda p: swap_index(p), r"but .*corpus\.idx describes"),
    "no documents": (lambda p: write_pair(p, []), "holds no documents"),
    "only empty documents": (lambda p: write_pair(p, documents_of([0, 0])), r"corpus\.bin is empty"),
    "only short documents": (
        lambda p: write_pair(p, documents_of([1, 0, 1])),
        r"all 3 train documents of .* fewer than 2 tokens",
    ),
}


def append_boundary(prefix, boundary):
    overwrite(f"{prefix}.idx", os.path.getsize(f"{prefix}.idx") - 8, np.int64(boundary).tobytes())


def swap_index(prefix):
    other = write_pair(f"{prefix}-other", documents_of([7, 8, 9]))
    os.replace(f"{other}.idx", f"{prefix}.idx")


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_pair_is_refused_in_two_lines_at_most(pair, breakage):
    break_it, says = BREAKAGES[breakage]
    break_it(pair)
    with pytest.raises(EppError, match=says) as caught:
        DocumentDataset(pair, context_limit=100)
    assert str(caught.value).count("\n") <= 1
    assert len(str(caught.value)) < 400


# Splits, blends and iterators, from Megatron's flags


def megatron_args(**given):
    defaults = {
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
        "split": "80,15,5",
        "seq_length": 300,
        "seed": 1234,
        "mmap_bin_files": True,
        "global_batch_size": 6,
        "eval_global_batch_size": 4,
        "eval_iters": 2,
        "skip_train": False,
        "eod_mask_loss": False,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return SimpleNamespace(**(defaults | given))


def iterators(args, rank=0, size=1, num_samples=(120, 16, 8)):
    return build_document_iterators(args, None, None, rank, size, num_samples)


def close(*opened):
    for iterator in opened:
        if iterator is not None:
            iterator.close()


def drawn(iterator, count):
    return [[tuple(batch.dataset.tokens(i).tolist()) for i in batch.indices] for batch in islice(iterator, count)]


@pytest.mark.parametrize("split", ["80,15,5", "969,30,1", "1,1,1", "0.5,0.25,0.25", "90,10"])
def test_splits_are_disjoint_and_leave_nothing_out(pair, split):
    splits = build_splits(megatron_args(data_path=[pair], split=split), (1, 1, 1))
    seen = [tuple(each[0].tokens(i).tolist()) for each in splits if each for i in range(len(each[0]))]
    assert seen == [tuple(document[:301].tolist()) for document in DOCUMENTS]


@pytest.mark.parametrize(
    ("split", "num_documents", "expected"), [("1,1,1", 5, [2, 1, 2]), ("80,15,5", 10, [8, 2, None]), ("98,1,1", 77, [75, 1, 1])]
)
def test_split_edges_are_rounded_as_megatron_rounds_them(tmp_path, split, num_documents, expected):
    prefix = write_pair(tmp_path / "corpus", documents_of([5] * num_documents))
    splits = build_splits(megatron_args(data_path=[prefix], split=split), (1, 1, 1))
    assert [each and len(each[0]) for each in splits] == expected


def test_iterators_yield_global_batches_of_each_split(pair):
    args = megatron_args(data_path=[pair])
    train, valid, test = iterators(args)
    assert [len(next(iterator).indices) for iterator in (train, valid, test)] == [6, 4, 4]
    batch = next(train)
    assert batch.lengths == tuple(batch.dataset.lengths[list(batch.indices)])
    close(train, valid, test)


def test_megatrons_replay_sees_the_same_batch_again(pair):
    train, valid, test = iterators(megatron_args(data_path=[pair]))
    machine = get_rerun_state_machine()
    mode = machine.get_mode()
    machine.set_mode(RerunMode.VALIDATE_RESULTS)
    try:
        wrapped = RerunDataIterator(train)
        first = next(wrapped)
        wrapped.rewind()
        assert next(wrapped) == first
        wrapped.advance()
        assert next(wrapped) != first
    finally:
        machine.set_mode(mode)
        close(train, valid, test)


def test_training_resumes_from_consumed_samples(pair):
    whole, resumed = (iterators(megatron_args(data_path=[pair], consumed_train_samples=n))[0] for n in (0, 18))
    expected = drawn(whole, 20)
    assert drawn(resumed, 17) == expected[3:]
    close(whole, resumed)


def test_validation_resumes_and_a_run_without_training_validates_from_the_start(pair):
    start, resumed, only_eval = (
        iterators(megatron_args(data_path=[pair], consumed_valid_samples=n, skip_train=skip))[1]
        for n, skip in ((0, False), (8, False), (8, True))
    )
    expected = drawn(start, 4)
    assert drawn(resumed, 2) == expected[2:]
    assert drawn(only_eval, 4) == expected
    close(start, resumed, only_eval)


def test_replicas_take_different_sequences_of_the_same_batch(pair):
    args = megatron_args(data_path=[pair])
    shares = [iterators(args, rank, 2)[0] for rank in range(2)]
    ((first,), (second,)) = (drawn(share, 1) for share in shares)
    whole = iterators(args)[0]
    assert sorted(first + second) == sorted(drawn(whole, 1)[0])
    close(*shares, whole)


def test_train_and_evaluation_have_their_own_planners(pair):
    asked = {"train": [], "eval": []}
    planners = [lambda lengths, name=name: asked[name].append(lengths) for name in asked]
    opened = build_document_iterators(megatron_args(data_path=[pair]), *planners, 0, 1, (60, 8, 8))
    batches = [next(iterator) for iterator in opened]
    assert asked["train"][0] == batches[0].lengths
    assert {batches[1].lengths, batches[2].lengths} <= set(asked["eval"])
    close(*opened)


def test_unwanted_splits_are_none(pair):
    train, valid, test = iterators(megatron_args(data_path=[pair], eval_iters=0, split="100,0,0"))
    assert (valid, test) == (None, None)
    close(train)
    train, valid, test = iterators(megatron_args(data_path=[pair], skip_train=True))
    assert train is None
    close(valid, test)
    train, valid, test = iterators(megatron_args(data_path=[pair], split="90,10,0"))
    assert test is None
    close(train, valid)


def test_end_of_document_loss_is_masked_when_asked(pair):
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 257, "pad_vocab_size": False}
    opened = iterators(megatron_args(data_path=[pair], eod_mask_loss=True, **tokenizer))
    assert {next(iterator).mask_loss_of for iterator in opened} == {256}
    close(*opened)


def sources_of(tmp_path, sizes):
    """Files whose every token is the number of the file, so that a token tells its source."""
    return [
        write_pair(tmp_path / f"source{number}", [np.full(4 + i, number) for i in range(size)])
        for number, size in enumerate(sizes)
    ]


def source_counts(dataset, start, stop):
    return np.bincount([dataset.tokens(i)[0] for i in range(start, stop)], minlength=3).tolist()


def test_a_weighted_blend_has_its_proportions_at_every_point(tmp_path):
    a, b = sources_of(tmp_path, [50, 5])
    ((dataset, shuffle), _, _) = build_splits(
        megatron_args(data_path=["30", a, "70", b], split="1,0,0", eval_iters=0), (1000, 0, 0)
    )
    assert not shuffle
    assert len(dataset) == 1000
    for start in range(0, 1000, 100):
        share = source_counts(dataset, start, start + 100)[0]
        assert abs(share - 30) <= 1


def test_a_source_of_a_blend_shows_all_its_documents_before_it_repeats_one(tmp_path):
    sources = [DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [40, 6])]
    blend = weighted(sources, [1, 1], num_samples=48, seed=5)
    from_second = [int(blend.lengths[i]) for i in range(48) if blend.tokens(i)[0] == 1]
    assert len(from_second) == 24
    epochs = [from_second[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(epoch) == [3, 4, 5, 6, 7, 8] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_more_iterations_only_lengthen_a_blend(tmp_path):
    sources = [DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [40, 6, 11])]
    short, long = (weighted(sources, [0.2, 0.5, 0.3], size, seed=5) for size in (100, 700))
    assert [short.tokens(i).tolist() for i in range(100)] == [long.tokens(i).tolist() for i in range(100)]


def test_prefixes_without_weights_give_every_document_once_per_epoch(tmp_path):
    a, b = sources_of(tmp_path, [20, 10])
    ((dataset, shuffle), _, _) = build_splits(megatron_args(data_path=[a, b], split="1,0,0", eval_iters=0), (1000, 0, 0))
    assert shuffle
    assert len(dataset) == 30
    assert source_counts(dataset, 0, 30)[:2] == [20, 10]
    epoch = [i for batch in islice(GlobalBatchSampler(30, 10), 3) for i in batch]
    assert sorted(epoch) == list(range(30))


def test_each_split_can_have_its_own_blend(tmp_path):
    a, b, c = sources_of(tmp_path, [20, 10, 8])
    args = megatron_args(train_data_path=["1", a, "3", b], valid_data_path=[c], split=None)
    (train, _), (valid, _), test = build_splits(args, (400, 8, 0))
    assert source_counts(train, 0, 400)[:2] == [100, 300]
    assert source_counts(valid, 0, 8) == [0, 0, 8]
    assert test is None


def test_data_paths_can_come_from_a_file(tmp_path):
    a, b = sources_of(tmp_path, [20, 10])
    (tmp_path / "blend.txt").write_text(f"1 {a}\n1 {b}\n")
    args = megatron_args(data_args_path=str(tmp_path / "blend.txt"), split="1,0,0", eval_iters=0)
    ((dataset, _), _, _) = build_splits(args, (40, 0, 0))
    assert source_counts(dataset, 0, 40)[:2] == [20, 20]


def test_blends_and_documents_survive_pickle(tmp_path):
    dataset = concatenate([DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [5, 3])])
    twin = pickle.loads(pickle.dumps(dataset))
    assert [twin.tokens(i).tolist() for i in range(8)] == [dataset.tokens(i).tolist() for i in range(8)]


REFUSED = {
    "no data path": ({}, "there are no documents to train on; pass --data-path"),
    "empty data path": ({"data_path": []}, "the data paths cannot be read"),
    "missing file": ({"data_path": ["/nowhere/corpus"]}, r"there is no file /nowhere/corpus\.idx"),
    "weights in front of some": (
        {"data_path": ["30", "PAIR", "PAIR", "PAIR"]},
        r"no file 30\.idx; .* weight and prefix in turn",
    ),
    "negative weight": ({"data_path": ["-1", "PAIR", "2", "PAIR"]}, r"the weights \[-1.0, 2.0\] of --data-path"),
    "only zero weights": ({"data_path": ["0", "PAIR", "0", "PAIR"]}, "not all 0"),
    "unreadable list": ({"data_args_path": "/nowhere/list"}, "the data paths cannot be read"),
    "no split": ({"data_path": ["PAIR"], "split": None}, "--split is missing"),
    "split of four": ({"data_path": ["PAIR"], "split": "1,1,1,1"}, "--split 1,1,1,1 is not up to three shares"),
    "split of nothing": ({"data_path": ["PAIR"], "split": "0,0,0"}, "--split 0,0,0 gives no split a share"),
    "no validation documents": (
        {"data_path": ["PAIR"], "split": "100,0,0"},
        "the valid split has no documents; give it a share in --split 100,0,0, or pass --eval-iters 0",
    ),
    "no training documents": ({"data_path": ["PAIR"], "split": "0,1,0"}, "the train split has no documents"),
    "validation without its path": ({"train_data_path": ["PAIR"]}, "pass --valid-data-path, or pass --eval-iters 0"),
    "indivisible batch": ({"data_path": ["PAIR"], "global_batch_size": 7}, "--global-batch-size 7 does not divide over 2"),
    "indivisible evaluation": ({"data_path": ["PAIR"], "eval_global_batch_size": 3}, "--eval-global-batch-size 3 does not"),
    "object storage": ({"data_path": ["s3://bucket/corpus"]}, "object storage, which is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_be_honoured_are_refused_by_name(pair, case):
    given, says = REFUSED[case]
    given = {name: [pair if part == "PAIR" else part for part in v] if isinstance(v, list) else v for name, v in given.items()}
    with pytest.raises(EppError, match=says) as caught:
        iterators(megatron_args(**given), rank=0, size=2)
    assert str(caught.value).count("\n") <= 1


def test_megatrons_own_reader_agrees(pair):
    theirs = IndexedDataset(pair)
    ours = DocumentDataset(pair, context_limit=10**6)
    assert [ours.tokens(i).tolist() for i in range(len(ours))] == [theirs[i].tolist() for i in range(len(theirs))]
