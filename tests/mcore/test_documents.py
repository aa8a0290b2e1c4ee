"""Documents in Megatron's indexed files, masks next to them, and its data flags under `--epp`; broken ones are refused."""

import argparse
import logging
import os
import pickle

import numpy as np
import pytest
import torch
from megatron.core.datasets import gpt_dataset

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.indexed_documents import LONG_DOCUMENTS
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.data.document_dataset import DocumentBlend, DocumentDataset, DocumentFile, check_mask
from megatron_epp.mcore.data.documents import build_splits, check_files_of, check_order, identity_of_run
from megatron_epp.mcore.model.losses import report_of
from megatron_epp.plan import Segment
from megatron_epp.plan.errors import EppError
from megatron_epp.tools.cli.lengths import lengths_of
from tests.support.mcore.megatron_flags import arguments, data_arguments
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
    assert lengths_of(asked).lengths == tuple(dataset.lengths.tolist())


def test_documents_that_train_nothing_are_skipped_counted_and_logged_once(tmp_path, caplog):
    documents = documents_of([0, 5, 1, 0, 2, 0, 30, 1])
    prefix = write_pair(tmp_path / "corpus", documents, num_sentences=2)
    with caplog.at_level(logging.INFO, logger="megatron_epp"):
        dataset = DocumentDataset(prefix, context_limit=20)
    assert dataset.num_skipped == 5
    assert dataset.lengths.tolist() == [4, 1, 20, 9]
    parts = documents[1], documents[4], documents[6][:21], documents[6][20:]
    assert [dataset.tokens(i).tolist() for i in range(4)] == [part.tolist() for part in parts]
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
    "only short documents": (lambda p: write_pair(p, documents_of([1, 0, 1])), r"all 3 train documents .* fewer than 2 tokens"),
}


def as_type(prefix, dtype, code, document=(1, 2, 3)):
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


MASKED_DOCUMENTS = [*documents_of(long_tailed_lengths(40, longest=500)), *documents_of([0, 1, 3])]


def trained(token):
    """The mask in these tests: a function of the token, so that labels tell theirs."""
    return token % 3 == 0


def write_masked(prefix, documents=MASKED_DOCUMENTS, num_sentences=1, dtype=np.uint16):
    write_pair(prefix, documents, num_sentences, dtype)
    trained(np.concatenate(documents)).astype(np.uint8).tofile(f"{prefix}.mask")
    return str(prefix)


def chunk_of(dataset, index, start, end):
    batch = GlobalBatch(indices=(index,), lengths=(int(dataset.lengths[index]),), dataset=dataset)
    return batch.chunk_of([Segment(0, start, end)])


@pytest.mark.parametrize("num_sentences", [1, 3])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(("limit", "long_documents"), [(10**6, "split"), (40, "split"), (40, "truncate")])
def test_every_label_has_its_own_mask(tmp_path, num_sentences, dtype, mmap, limit, long_documents):
    prefix = write_masked(tmp_path / "corpus", MASKED_DOCUMENTS, num_sentences, dtype)
    dataset = DocumentDataset(DocumentFile(prefix, mmap), limit, first=3, long_documents=long_documents)
    for index in range(len(dataset)):
        length = int(dataset.lengths[index])
        for start, end in ((0, length), (length // 2, length)):
            arrays = chunk_of(dataset, index, start, end)
            assert torch.equal(arrays.loss_mask, trained(arrays.labels).float())


def test_a_blend_has_masks_of_those_of_its_files_that_have_one(tmp_path):
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", MASKED_DOCUMENTS)
    args = data_arguments(data_path=["1", masked, "1", plain], split="1,0,0", eval_iters=0)
    ((dataset, _), _, _) = build_splits(args, (60, 0, 0), identity_of_run(args))
    counts = {True: 0, False: 0}
    for index in range(len(dataset)):
        arrays = chunk_of(dataset, index, 0, int(dataset.lengths[index]))
        has_mask = dataset.trained(index, 0, 1) is not None
        counts[has_mask] += 1
        expected = trained(arrays.labels).float() if has_mask else torch.ones_like(arrays.loss_mask)
        assert torch.equal(arrays.loss_mask, expected)
    assert counts == {True: 30, False: 30}


def test_blends_documents_and_masks_survive_pickle(tmp_path):
    dataset = DocumentBlend([DocumentDataset(write_masked(tmp_path / name), 10**6) for name in ("a", "b")])
    twin = pickle.loads(pickle.dumps(dataset))
    for read in (DocumentBlend.tokens, DocumentBlend.trained):
        assert [read(twin, i, 0, 3).tolist() for i in range(9)] == [read(dataset, i, 0, 3).tolist() for i in range(9)]


def test_a_mask_is_logged_once_and_files_without_are_not(tmp_path, caplog):
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", MASKED_DOCUMENTS)
    args = data_arguments(data_path=[masked, plain])
    check_files_of(args)
    with caplog.at_level("INFO", logger="megatron_epp"):
        build_splits(args, (1, 1, 1), identity_of_run(args))
    (line,) = [record.getMessage() for record in caplog.records if ".mask" in record.getMessage()]
    assert line.startswith(f"{masked}.mask: only tokens that this mask marks with 1 count in the loss")


def test_a_mask_of_other_tokens_is_refused_when_it_is_opened(tmp_path):
    prefix = write_masked(tmp_path / "corpus")
    num_tokens = sum(map(len, MASKED_DOCUMENTS))
    with open(f"{prefix}.mask", "ab") as stream:
        stream.write(b"\x00")
    says = rf"corpus\.mask has {num_tokens + 1:,} bytes and .*corpus\.bin has {num_tokens:,} tokens"
    for opening in (DocumentFile, lambda prefix: check_files_of(data_arguments(data_path=[prefix]))):
        with pytest.raises(EppError, match=says):
            opening(prefix)


def test_a_mask_is_refused_beside_megatrons_own_samples(tmp_path):
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", MASKED_DOCUMENTS)
    args = data_arguments(data_path=["1", plain, "1", masked], epp_documents="stream")
    for check in (check_files_of, lambda args: build_splits(args, (1, 1, 1), identity_of_run(args))):
        with pytest.raises(EppError, match=rf"{masked}\.mask is not used by --epp-documents stream"):
            check(args)


def test_values_that_are_no_mask_are_refused_before_training_where_the_sample_has_them_and_else_when_read(tmp_path):
    prefix = write_masked(tmp_path / "corpus", documents_of([5000, 5000]))
    values = np.fromfile(f"{prefix}.mask", np.uint8)
    values[4999] = 2  # behind what the sample has of the first document
    values.tofile(f"{prefix}.mask")
    check_mask(DocumentFile(prefix))
    dataset = DocumentDataset(prefix, 10**6)
    with pytest.raises(EppError, match=r"corpus\.mask has 2 for token 4,999, where 1"):
        chunk_of(dataset, 0, 0, 4999)
    values[5000] = 255
    values.tofile(f"{prefix}.mask")
    with pytest.raises(EppError, match=r"corpus\.mask has 255 for token 5,000, where 1"):
        check_mask(DocumentFile(prefix))


def late_answers(prefix, begins_at=25, count=12, length=30):
    write_pair(prefix, documents_of([length] * count))
    np.tile(np.arange(length) >= begins_at, count).astype(np.uint8).tofile(f"{prefix}.mask")
    return str(prefix)


def test_documents_whose_trained_tokens_are_all_cut_off_are_refused(tmp_path):
    """Truncation and mask are counted together: each by itself leaves much."""
    prefix = late_answers(tmp_path / "corpus")
    cut = {"data_path": [prefix], "split": "1,0,0", "eval_iters": 0, "epp_documents": "truncate"}
    says = (
        r"corpus\.mask marks 60 labels of 12 documents, and --epp-documents truncate cuts all of them off with the 156 tokens "
        "that 12 documents have beyond --seq-length 16: raise it, or use --epp-documents split$"
    )
    args = data_arguments(**cut, seq_length=16)
    for check in (check_files_of, lambda args: build_splits(args, (1, 0, 0), identity_of_run(args))):
        with pytest.raises(EppError, match=says):
            check(args)
    for longer in ({"seq_length": 25}, {"seq_length": 16, "epp_documents": "split"}):
        ((dataset, _), _, _) = build_splits(args := data_arguments(**(cut | longer)), (1, 0, 0), identity_of_run(args))
        assert any(dataset.trained(index, 1, int(dataset.lengths[index]) + 1).any() for index in range(len(dataset)))


def test_a_mask_without_a_label_is_refused_and_where_only_validation_has_one_it_is_told(tmp_path, caplog):
    first = str(tmp_path / "first")
    write_pair(first, documents_of([9] * 12))
    np.tile(np.arange(9) == 0, 12).astype(np.uint8).tofile(f"{first}.mask")  # the first token is no label
    args = data_arguments(data_path=[first], split="1,0,0", eval_iters=0)
    with pytest.raises(EppError, match=r"first\.mask marks no label of 12 documents: make it again .*, or remove it to train"):
        build_splits(args, (1, 0, 0), identity_of_run(args))
    values = np.fromfile(f"{first}.mask", np.uint8)
    values[1] = 1
    values.tofile(f"{first}.mask")
    args = data_arguments(data_path=[first], split="6,6,0", eval_iters=1)
    build_splits(args, (1, 1, 0), identity_of_run(args))
    assert "no token of the valid documents is trained: " in caplog.text
    assert "no label of 6 documents" in caplog.text


def test_the_share_of_trained_tokens_that_truncation_cuts_off_is_told(tmp_path, caplog):
    prefix = late_answers(tmp_path / "corpus", begins_at=15)
    DocumentDataset(prefix, 29, long_documents="truncate")
    DocumentDataset(prefix, 16, long_documents="split")
    assert "trained tokens" not in caplog.text
    DocumentDataset(prefix, 16, 2, 11, long_documents="truncate")
    assert "truncate leaves out 117 of 135 trained tokens (86.7%): raise --seq-length 16" in caplog.text


@pytest.mark.parametrize("sums", [[(0.0, 0.0)], [(0.0, 0.0), (6.5, 3.0)], [(0.1, 1.0), (0.0, 0.0), (0.0, 0.0)]])
def test_reports_of_no_tokens_add_nothing_and_give_no_nan(sums):
    """Megatron adds up the reports of microbatches and replicas, and divides."""
    loss, num_tokens = torch.stack([report_of(torch.tensor(each))["lm loss"] for each in sums]).sum(dim=0)
    exact_loss, exact_tokens = torch.tensor(sums).sum(dim=0)
    assert loss / num_tokens == (exact_loss / exact_tokens if exact_tokens else 0.0)
    assert num_tokens == exact_tokens or not exact_tokens


def warned(caplog, *epp, **flags):
    caplog.clear()
    prepare_epp_args(arguments(*epp, **flags))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_flags_that_are_given_and_change_nothing_are_named_in_a_line_on_rank_0(caplog):
    (line,) = warned(caplog, reset_position_ids=True, reset_attention_mask=True, create_attention_mask_in_dataloader=False)
    assert "--reset-position-ids, --reset-attention-mask, --no-create-attention-mask-in-dataloader" in line
    (line,) = warned(caplog, data_cache_path="cache", num_dataset_builder_threads=4)
    assert "--data-cache-path, --num-dataset-builder-threads" in line
    (line,) = warned(caplog, eod_mask_loss=True)
    assert "--eod-mask-loss" in line
    (line,) = warned(caplog, "--epp-documents", "stream", data_cache_path="cache", num_workers=7, eod_mask_loss=True)
    assert line.startswith("--epp makes no use of --num-workers: ")
    assert warned(caplog) == []
    assert warned(caplog, num_workers=2, mid_level_dataset_surplus=0.005, create_attention_mask_in_dataloader=True) == []
    assert warned(caplog, rank=1, reset_position_ids=True) == []


SAVED, EXPERTS = {"save": "runs", "use_distributed_optimizer": True}, {"num_experts": 4, "expert_model_parallel_size": 2}
RESHARDABLE = SAVED | {"dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    ("flags", "others", "says"),
    [
        (SAVED, {"save": "runs"}, "--dist-ckpt-optim-fully-reshardable keeps it for every layout"),
        (RESHARDABLE | EXPERTS, RESHARDABLE, "state saved with --expert-model-parallel-size 2 loads only with 2 or more"),
        (RESHARDABLE | {"overlap_grad_reduce": True}, RESHARDABLE, "saves wrong optimizer state for --dist-ckpt-optim-fully"),
    ],
)
def test_with_what_saved_optimizer_state_loads_is_told_and_a_warning_where_it_is_wrong(caplog, flags, others, says):
    caplog.set_level(logging.INFO)
    assert bool(warned(caplog, **flags)) == ("wrong" in says)
    assert says in caplog.text
    for quiet in (others, flags | {"rank": 1}):
        assert warned(caplog, **quiet) == []
        assert says not in caplog.text


def test_the_loss_is_masked_behind_ends_of_documents_where_megatron_masks_it(tmp_path):
    """In a document of several texts, split too: the ends inside of it."""
    eod, document = 9, [1, 2, 9, 3, 9, 9, 4, 5, 6, 9, 7, 9]
    prefix = write_pair(tmp_path / "corpus", [document])
    for limit in (100, 4):
        dataset = DocumentDataset(prefix, limit)
        lengths = tuple(dataset.lengths.tolist())
        for index, length in enumerate(lengths):
            batch = GlobalBatch(indices=(index,), lengths=(length,), plan=None, dataset=dataset, mask_loss_of=eod)
            arrays = batch.chunk_of([Segment(0, 0, length)])
            _, mask, _ = gpt_dataset._get_ltor_masks_and_position_ids(arrays.tokens, eod, False, False, True, False)
            assert torch.equal(arrays.loss_mask, mask)
            assert torch.equal(arrays.position_ids, torch.arange(length))


def checkpoint(**changes):
    values = {"epp": True, "epp_documents": "split", "seed": 1, "split": "99,1,0", "seq_length": 64, "rank": 0} | changes
    return argparse.Namespace(**{name: value for name, value in values.items() if value != "gone"})


def test_a_run_that_changes_nothing_of_the_order_or_is_of_megatrons_own_training_resumes_without_a_word(caplog):
    check_order(checkpoint(), checkpoint())
    truncated = checkpoint(epp_documents="truncate")
    check_order(truncated, checkpoint(epp_documents="truncate", seq_length=128))  # shorter ones are the same, in the same order
    assert not caplog.records
    check_order(checkpoint(epp=False, epp_documents="gone"), checkpoint(seed=7))
    check_order(checkpoint(epp="gone", epp_documents="gone"), checkpoint(seed=7))


@pytest.mark.parametrize("changed", [{"seed": 2}, {"split": "100,0,0"}, {"seq_length": 128}], ids=str)
def test_what_changes_the_order_of_sequences_is_named(caplog, changed):
    ((name, value),) = changed.items()
    for how in ("split", "stream"):
        caplog.clear()
        for rank in (0, 1):
            check_order(checkpoint(epp_documents=how), checkpoint(epp_documents=how, rank=rank, **changed))
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"--{name.replace('_', '-')} was {getattr(checkpoint(), name)} and is {value}: sequences come in another" in line
