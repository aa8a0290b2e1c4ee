"""Masks of trained tokens: read as they are, and refused if they are of other tokens or no masks."""

import pickle

import numpy as np
import pytest

from megatron_epp.data.indexed_documents import TokenMask, open_mask
from megatron_epp.plan.errors import EppError

VALUES = [0, 1, 1, 0, 0, 1, 0]


@pytest.fixture
def prefix(tmp_path):
    write(tmp_path, VALUES)
    return str(tmp_path / "corpus")


def write(folder, values):
    np.asarray(values, dtype=np.uint8).tofile(folder / "corpus.mask")


@pytest.mark.parametrize("mmap", [True, False])
def test_parts_of_a_mask_are_read_as_they_are(prefix, mmap):
    mask = open_mask(prefix, len(VALUES), mmap)
    for start, end in [(0, 7), (2, 5), (6, 7), (3, 3)]:
        assert mask.read(start, end).tolist() == VALUES[start:end]


def test_there_may_be_none(tmp_path):
    assert open_mask(str(tmp_path / "corpus"), 7) is None


@pytest.mark.parametrize("mmap", [True, False])
def test_a_mask_survives_pickle_without_its_values(prefix, mmap):
    mask = TokenMask(prefix, len(VALUES), mmap)
    pickled = pickle.dumps(mask)
    assert pickle.loads(pickled).read(0, 7).tolist() == VALUES
    assert len(pickled) < 300


@pytest.mark.parametrize("num_bytes", [0, 6, 8, 14])
def test_a_mask_of_another_size_is_refused_with_both_numbers(tmp_path, num_bytes):
    write(tmp_path, [0] * num_bytes)
    says = rf"corpus\.mask has {num_bytes} bytes and .*corpus\.bin has 7 tokens, .* remove the mask to train on all tokens"
    with pytest.raises(EppError, match=says) as caught:
        open_mask(str(tmp_path / "corpus"), 7)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_value_other_than_0_and_1_is_refused_with_its_token_where_it_is_read(tmp_path, mmap):
    write(tmp_path, [0, 1, 1, 0, 49, 1, 50])
    mask = open_mask(str(tmp_path / "corpus"), 7, mmap)
    assert mask.read(0, 4).tolist() == [0, 1, 1, 0]
    with pytest.raises(EppError, match=r"corpus\.mask has 49 for token 4, where 1 \(trained\) or 0 \(not\) is expected; make"):
        mask.read(2, 7)
