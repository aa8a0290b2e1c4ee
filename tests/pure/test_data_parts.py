"""Small parts of the data: samples that are shown, lengths that are drawn, masks of trained tokens."""

import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from megatron_epp.data import sequence_lengths
from megatron_epp.data.chat import example_lines
from megatron_epp.data.indexed_documents import TokenMask, open_mask
from megatron_epp.plan.errors import EppError

# ---- samples of conversations, with what is trained marked -----------------------------------------------------------


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


# ---- lengths: equal seeds give equal ones, distributed as their corpora are ------------------------------------------


@pytest.mark.parametrize(
    ("corpus", "median", "longest"), [("wikipedia", 344, 269428), ("code", 2200, 1 << 24), ("chat", 640, 1 << 24)]
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


def test_articles_files_of_code_and_chats_are_distributed_as_was_counted():
    found = sequence_lengths.wikipedia(400_000, 7)
    for share, length in sequence_lengths.WIKIPEDIA[1:-2]:  # behind them are a few dozen
        assert np.quantile(found, share) == pytest.approx(length, rel=0.1, abs=2)
    found = sequence_lengths.code(20_000, 7)
    assert (found >= 16384).mean() == pytest.approx(0.05 + 0.95 * 0.053, abs=0.01)
    found = sequence_lengths.chat(20_000, 7)
    assert (found > 5000).mean() == pytest.approx(0.99 / 16, abs=0.01)
    assert np.median(found[found > 5000]) == pytest.approx(60_000, rel=0.15)


# ---- masks: read as they are, and refused if they are of other tokens or no masks ------------------------------------


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
