"""Masks of trained tokens next to Megatron's indexed files: every label has its own, in parts of documents and in blends."""

import pickle

import numpy as np
import pytest
import torch

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore.data.document_dataset import DocumentBlend, DocumentDataset
from megatron_epp.mcore.data.document_file import DocumentFile, check_mask
from megatron_epp.mcore.data.documents import build_splits, check_files_of
from megatron_epp.mcore.data.encoders import identity_of_run
from megatron_epp.mcore.model.losses import report_of
from megatron_epp.plan import Segment
from megatron_epp.plan.errors import EppError
from tests.support.mcore.megatron_flags import data_arguments
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

DOCUMENTS = [*documents_of(long_tailed_lengths(40, longest=500)), *documents_of([0, 1, 3])]


def trained(token):
    """The mask in these tests: a function of the token, so that labels tell theirs."""
    return token % 3 == 0


def write_masked(prefix, documents=DOCUMENTS, num_sentences=1, dtype=np.uint16):
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
    prefix = write_masked(tmp_path / "corpus", DOCUMENTS, num_sentences, dtype)
    dataset = DocumentDataset(DocumentFile(prefix, mmap), limit, first=3, long_documents=long_documents)
    for index in range(len(dataset)):
        length = int(dataset.lengths[index])
        for start, end in ((0, length), (length // 2, length)):
            arrays = chunk_of(dataset, index, start, end)
            assert torch.equal(arrays.loss_mask, trained(arrays.labels).float())


def test_a_blend_has_masks_of_those_of_its_files_that_have_one(tmp_path):
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", DOCUMENTS)
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
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", DOCUMENTS)
    args = data_arguments(data_path=[masked, plain])
    check_files_of(args)
    with caplog.at_level("INFO", logger="megatron_epp"):
        build_splits(args, (1, 1, 1), identity_of_run(args))
    (line,) = [record.getMessage() for record in caplog.records if ".mask" in record.getMessage()]
    assert line.startswith(f"{masked}.mask: only tokens that this mask marks with 1 count in the loss")


def test_a_mask_of_other_tokens_is_refused_when_it_is_opened(tmp_path):
    prefix = write_masked(tmp_path / "corpus")
    num_tokens = sum(map(len, DOCUMENTS))
    with open(f"{prefix}.mask", "ab") as stream:
        stream.write(b"\x00")
    says = rf"corpus\.mask has {num_tokens + 1:,} bytes and .*corpus\.bin has {num_tokens:,} tokens"
    for opening in (DocumentFile, lambda prefix: check_files_of(data_arguments(data_path=[prefix]))):
        with pytest.raises(EppError, match=says):
            opening(prefix)


def test_a_mask_is_refused_beside_megatrons_own_samples(tmp_path):
    masked, plain = write_masked(tmp_path / "masked"), write_pair(tmp_path / "plain", DOCUMENTS)
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
    """Documents of which only tokens from one on are trained."""
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
