"""From Megatron's data flags to splits, blends and the iterators of global batches."""

from itertools import islice

import numpy as np
import pytest

from megatron_epp.data import sampler
from megatron_epp.data.iterator import PlanSource
from megatron_epp.data.sampler import GlobalBatchSampler, epoch_order
from megatron_epp.mcore.data.document_dataset import DocumentDataset, weighted
from megatron_epp.mcore.data.documents import build_document_iterators, build_splits, identity_of_run
from megatron_epp.plan.errors import EppError
from megatron_epp.planner import UNLIMITED_BYTES, Problem, plan
from megatron_epp.port.pack_plan import pack
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.mcore.megatron_flags import data_arguments
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

DOCUMENTS = documents_of(long_tailed_lengths(60, longest=2000))


@pytest.fixture
def pair(tmp_path):
    return write_pair(tmp_path / "corpus", DOCUMENTS)


def splits_of(args, num_samples):
    return build_splits(args, num_samples, identity_of_run(args))


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
    splits = splits_of(data_arguments(data_path=[pair], split=split), (1, 1, 1))
    seen = [tuple(each[0].tokens(i).tolist()) for each in splits if each for i in range(len(each[0]))]
    assert [sequence[0] for sequence in seen] == [token for document in DOCUMENTS for token in document[:-1:300]]
    assert [label for sequence in seen for label in sequence[1:]] == [label for document in DOCUMENTS for label in document[1:]]


ROUNDED = [("1,1,1", 5, [2, 1, 2]), ("80,15,5", 10, [8, 2, None]), ("98,1,1", 77, [75, 1, 1])]


@pytest.mark.parametrize(("split", "num_documents", "expected"), ROUNDED)
def test_split_edges_are_rounded_as_megatron_rounds_them(tmp_path, split, num_documents, expected):
    prefix = write_pair(tmp_path / "corpus", documents_of([5] * num_documents))
    splits = splits_of(data_arguments(data_path=[prefix], split=split), (1, 1, 1))
    assert [each and len(each[0]) for each in splits] == expected


def test_training_and_validation_resume_and_a_run_without_training_validates_from_the_start(pair):
    whole, resumed = (iterators(data_arguments(data_path=[pair], consumed_train_samples=n))[0] for n in (0, 18))
    expected = drawn(whole, 20)
    assert drawn(resumed, 17) == expected[3:]
    close(whole, resumed)
    consumed = [{"consumed_valid_samples": n, "skip_train": skip} for n, skip in ((0, False), (8, False), (8, True))]
    start, resumed, only_eval = (iterators(data_arguments(data_path=[pair], **own))[1] for own in consumed)
    expected = drawn(start, 4)
    assert drawn(resumed, 2) == expected[2:]
    assert drawn(only_eval, 4) == expected
    close(start, resumed, only_eval)


def test_replicas_take_different_sequences_of_the_same_batch(pair):
    args = data_arguments(data_path=[pair])
    shares = [iterators(args, rank, 2)[0] for rank in range(2)]
    ((first,), (second,)) = (drawn(share, 1) for share in shares)
    whole = iterators(args)[0]
    assert sorted(first + second) == sorted(drawn(whole, 1)[0])
    close(*shares, whole)


def test_train_and_evaluation_have_their_own_planners(pair):
    shape = ModelShape(num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
    costs, asked = analytic_costs(shape, CPU, [1]), {"train": [], "eval": []}

    def source(name):
        def make(batch):
            lengths = batch.lengths
            asked[name].append(lengths)
            return (pack(plan(Problem(lengths, (0,), (UNLIMITED_BYTES,)), costs), 1.0, tuple(range(len(lengths)))),)

        return PlanSource(make)

    opened = build_document_iterators(data_arguments(data_path=[pair]), source("train"), source("eval"), 0, 1, (60, 8, 8))
    batches = [next(iterator) for iterator in opened]
    assert [len(batch.indices) for batch in batches] == [6, 4, 4]
    assert batches[0].lengths == tuple(batches[0].dataset.lengths[list(batches[0].indices)])
    assert asked["train"][0] == batches[0].lengths
    assert {batches[1].lengths, batches[2].lengths} <= set(asked["eval"])
    close(*opened)


def test_unwanted_splits_are_none(pair):
    without = {
        "0 1 2": {},
        "0": {"eval_iters": 0, "split": "100,0,0"},
        "1 2": {"skip_train": True},
        "0 1": {"split": "90,10,0"},
    }
    for there, unwanted in without.items():
        opened = iterators(data_arguments(data_path=[pair], **unwanted))
        assert [number for number, iterator in enumerate(opened) if iterator is not None] == [*map(int, there.split())]
        close(*opened)


def test_end_of_document_loss_is_masked_when_asked(pair):
    opened = iterators(data_arguments(data_path=[pair], eod_mask_loss=True))
    assert {next(iterator).mask_loss_of for iterator in opened} == {256}
    close(*opened)


def test_a_run_looks_at_the_tokens_of_every_file_before_it_trains(pair):
    with pytest.raises(EppError, match=r"corpus has token \d+, and this run's tokenizer has a vocabulary of 200"):
        iterators(data_arguments(data_path=[pair], vocab_size=200))


def test_data_paths_of_their_own_leave_the_split_without_effect_which_is_said(pair, caplog):
    splits_of(data_arguments(train_data_path=[pair], eval_iters=0), (10, 0, 0))
    assert "--split 80,15,5 changes nothing: every split has data paths of its own" in caplog.text


def sources_of(tmp_path, sizes):
    """Files whose every token is the number of the file, so that a token tells its source."""
    return [write_pair(tmp_path / f"source{n}", [np.full(4 + i, n) for i in range(size)]) for n, size in enumerate(sizes)]


def blend_of(**given):
    """The train split of all documents, 1,000 sequences of it, and whether their order is drawn."""
    train, _, _ = splits_of(data_arguments(**given, split="1,0,0", eval_iters=0), (1000, 0, 0))
    return train


def source_counts(dataset, start, stop):
    return np.bincount([dataset.tokens(i)[0] for i in range(start, stop)], minlength=3).tolist()


def test_a_weighted_blend_has_its_proportions_at_every_point(tmp_path):
    a, b = sources_of(tmp_path, [50, 5])
    dataset, shuffle = blend_of(data_path=["30", a, "70", b])
    assert not shuffle
    assert len(dataset) == 1000
    for start in range(0, 1000, 100):
        assert abs(source_counts(dataset, start, start + 100)[0] - 30) <= 1


def test_the_order_of_a_blend_of_few_documents_is_that_of_earlier_versions(tmp_path):
    sources = [DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [40, 6])]
    drawn = weighted(sources, [1, 1], num_samples=16, seed=5)
    in_turn = [epoch_order(40, 5, 0, 0), np.concatenate([epoch_order(6, 5, epoch, 1) for epoch in range(2)])]
    expected = [sources[draw % 2].tokens(in_turn[draw % 2][draw // 2]).tolist() for draw in range(16)]
    assert [drawn.tokens(draw).tolist() for draw in range(16)] == expected


@pytest.mark.parametrize("large", [1 << 24, 5])  # above that, a source's order is computed entry by entry
def test_a_source_of_a_blend_shows_all_its_documents_before_it_repeats_one(tmp_path, monkeypatch, large):
    monkeypatch.setattr(sampler, "_LARGE", large)
    sources = [DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [40, 6])]
    blend = weighted(sources, [1, 1], num_samples=48, seed=5)
    from_second = [int(blend.lengths[i]) for i in range(48) if blend.tokens(i)[0] == 1]
    assert len(from_second) == 24
    epochs = [from_second[start : start + 6] for start in range(0, 24, 6)]
    assert all(sorted(epoch) == [3, 4, 5, 6, 7, 8] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


@pytest.mark.parametrize("large", [1 << 24, 5])
def test_more_iterations_only_lengthen_a_blend(tmp_path, monkeypatch, large):
    monkeypatch.setattr(sampler, "_LARGE", large)
    monkeypatch.setattr(sampler, "_PART", 4)
    sources = [DocumentDataset(prefix, 10**6) for prefix in sources_of(tmp_path, [40, 6, 11])]
    short, long = (weighted(sources, [0.2, 0.5, 0.3], size, seed=5) for size in (100, 700))
    assert [short.tokens(i).tolist() for i in range(100)] == [long.tokens(i).tolist() for i in range(100)]


def test_prefixes_without_weights_give_every_document_once_per_epoch(tmp_path):
    a, b = sources_of(tmp_path, [20, 10])
    dataset, shuffle = blend_of(data_path=[a, b])
    assert shuffle
    assert len(dataset) == 30
    assert source_counts(dataset, 0, 30)[:2] == [20, 10]
    assert sorted([i for batch in islice(GlobalBatchSampler(30, 10), 3) for i in batch]) == list(range(30))


def test_each_split_can_have_its_own_blend(tmp_path):
    a, b, c = sources_of(tmp_path, [20, 10, 8])
    args = data_arguments(train_data_path=["1", a, "3", b], valid_data_path=[c], split=None)
    (train, _), (valid, _), test = splits_of(args, (400, 8, 0))
    assert source_counts(train, 0, 400)[:2] == [100, 300]
    assert source_counts(valid, 0, 8) == [0, 0, 8]
    assert test is None


def test_data_paths_can_come_from_a_file(tmp_path):
    a, b = sources_of(tmp_path, [20, 10])
    (tmp_path / "blend.txt").write_text(f"1 {a}\n1 {b}\n")
    dataset, _ = blend_of(data_args_path=str(tmp_path / "blend.txt"))
    assert source_counts(dataset, 0, 40)[:2] == [20, 20]


REFUSED = {
    "no data path": ({}, "there are no documents to train on; pass --data-path"),
    "empty data path": ({"data_path": []}, "the data paths cannot be read"),
    "missing file": ({"data_path": ["/nowhere/corpus"]}, r"there is no file /nowhere/corpus\.idx"),
    "weights in front of some": ({"data_path": ["30", *["PAIR"] * 3]}, r"no file 30\.idx; .* weight and prefix in turn"),
    "negative weight": ({"data_path": ["-1", "PAIR", "2", "PAIR"]}, r"the weights \[-1.0, 2.0\] of --data-path"),
    "only zero weights": ({"data_path": ["0", "PAIR", "0", "PAIR"]}, "not all 0"),
    "unreadable list": ({"data_args_path": "/nowhere/list"}, "the data paths cannot be read"),
    "no split": ({"data_path": ["PAIR"], "split": None}, "--split is missing"),
    "split of four": ({"data_path": ["PAIR"], "split": "1,1,1,1"}, "--split 1,1,1,1 is not up to three shares"),
    "split of nothing": ({"data_path": ["PAIR"], "split": "0,0,0"}, "--split 0,0,0 gives no split a share"),
    "no validation documents": ({"data_path": ["PAIR"], "split": "9,0,0"}, "valid split has no .* --split 9,0,0, or pass"),
    "no training documents": ({"data_path": ["PAIR"], "split": "0,1,0"}, "the train split has no documents"),
    "validation without its path": ({"train_data_path": ["PAIR"]}, "pass --valid-data-path, or pass --eval-iters 0"),
    "object storage": ({"data_path": ["s3://bucket/corpus"]}, "object storage, which is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_flags_that_cannot_be_honoured_are_refused_by_name(pair, case):
    given, says = REFUSED[case]
    given = {name: [pair if part == "PAIR" else part for part in v] if isinstance(v, list) else v for name, v in given.items()}
    with pytest.raises(EppError, match=says) as caught:
        iterators(data_arguments(**given), rank=0, size=2)
    assert str(caught.value).count("\n") <= 1
