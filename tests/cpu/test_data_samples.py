"""Samples are read from JSONL with the columns that a loss asks for, and what is wrong with one is said with its line."""

import gzip
import json

import numpy as np
import pyarrow.parquet
import pytest

from megatron_epp.data.batch import GlobalBatch, LossColumns
from megatron_epp.data.samples import Samples, TokenSample, read_samples
from megatron_epp.losses import Average
from megatron_epp.plan import EppError, Segment

GOOD = {"tokens": [3, 1, 4], "trained": [0, 1, 1], "advantages": 0.5, "old_logprobs": [0, -1, -2], "note": "not read"}
ASKS = LossColumns(("advantages", "old_logprobs"), Average.TOKENS)


def read(tmp_path, *samples, asks=ASKS, most_tokens=8, vocab_size=9):
    path = tmp_path / "samples.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in samples))
    return read_samples(path, asks, most_tokens, vocab_size)


def test_a_file_has_a_sequence_in_every_line_and_one_number_stands_for_all_tokens(tmp_path):
    found = read(tmp_path, GOOD, "", {"tokens": [1, 2], "advantages": -1, "old_logprobs": [0, -3]})
    assert found.lengths.tolist() == [2, 1]
    assert found.tokens(0, 1, 3).tolist() == [1, 4]
    assert found.trained(0, 1, 3).tolist() == [1, 1]
    assert found.trained(1, 1, 2) is None
    assert found.column("advantages", 0, 1, 3).tolist() == [0.5, 0.5]
    assert found.column("old_logprobs", 0, 1, 3).tolist() == [-1, -2]


def test_samples_of_compressed_jsonl_and_of_parquet_are_those_of_jsonl(tmp_path):
    rows = [GOOD, GOOD | {"tokens": [1, 2, 5], "trained": None, "advantages": -1.0}]
    (tmp_path / "samples.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "samples.parquet")
    for name in ("samples.jsonl.gz", "samples.parquet"):
        samples = read_samples(tmp_path / name, ASKS, 8, 9)
        assert [samples.tokens(index).tolist() for index in (0, 1)] == [[3, 1, 4], [1, 2, 5]]
        assert samples.trained(0, 0, 3).tolist() == [0, 1, 1]
        assert samples.trained(1, 0, 3) is None
        assert samples.column("advantages", 0, 1, 3).tolist() == [0.5, 0.5]
        assert samples.column("old_logprobs", 1, 1, 3).tolist() == [-1, -2]
    with pytest.raises(EppError, match=r"samples\.parquet: row 2 has token 5, and the vocabulary 5 entries"):
        read_samples(tmp_path / "samples.parquet", ASKS, 8, 5)


WRONG = {
    "no JSON": ("{", "line 2"),
    "no object": ("[1, 2]", "line 2 is no object with tokens"),
    "no tokens": ({"advantages": 1}, "line 2 has no tokens"),
    "one token": (GOOD | {"tokens": [1]}, "line 2: tokens must be a list of at least 2 integers"),
    "no integers": (GOOD | {"tokens": [1.5, 2, 3]}, "line 2: tokens must be a list of at least 2 integers"),
    "words": (GOOD | {"tokens": ["a", "b"]}, "line 2: tokens must be numbers"),
    "no column": (
        {"tokens": [1, 2], "advantages": 1},
        "line 2 has no old_logprobs, which the loss reads; it has tokens, advantages",
    ),
    "another length": (GOOD | {"old_logprobs": [0, 1]}, "line 2: old_logprobs has 2 values for 3 tokens"),
    "ragged": (GOOD | {"old_logprobs": [[0], [1, 2]]}, "line 2: old_logprobs"),
    "not finite": (GOOD | {"advantages": float("nan")}, "line 2: advantages is nan for token 1, which is trained: it must be"),
    "a mask of other values": (GOOD | {"trained": [0, 2, 1]}, "line 2: trained must be 0 or 1"),
    "too long": (
        GOOD | {"tokens": [1] * 10, "trained": 1, "old_logprobs": 0},
        "line 2 has 10 tokens, 9 positions of 8 at most; samples",
    ),
    "unknown token": (GOOD | {"tokens": [1, 9, 2]}, "line 2 has token 9, and the vocabulary 9 entries"),
}


def test_a_file_without_samples_or_no_file_is_refused(tmp_path):
    with pytest.raises(EppError, match="there is no sample"):
        read(tmp_path, "")
    with pytest.raises(EppError, match=r"cannot read .*missing\.jsonl"):
        read_samples(tmp_path / "missing.jsonl", ASKS, 8)


def test_arrays_and_what_has_a_list_are_taken_as_lists():
    sample = TokenSample.of(
        {"tokens": np.array([1, 2, 3]), "trained": np.array([False, True, True])}, LossColumns((), Average.TOKENS), "a"
    )
    samples = Samples([sample])
    assert samples.tokens(0).tolist() == [1, 2, 3]
    assert samples.trained(0, 0, 3).tolist() == [0, 1, 1]


TEACHER = LossColumns(("teacher", "weight"), Average.TOKENS, {"teacher": 2}, "teacher")
TAUGHT = {"tokens": [3, 1, 4], "trained": [0, 1, 0], "teacher": [[-1, 99], [5, 8], [0.5, -7]], "weight": 2}


def test_a_column_may_have_several_values_of_every_token_of_which_those_that_train_are_checked(tmp_path):
    found = read(tmp_path, TAUGHT, asks=TEACHER)
    assert found.column("teacher", 0, 1, 3).tolist() == [[5, 8], [0.5, -7]]
    arrays = GlobalBatch(indices=(0,), lengths=(2,), dataset=found).chunk_of([Segment(0, 0, 2)], 4, of_loss=TEACHER).of_loss
    assert arrays.columns.tolist() == [[5, 0.5, 0, 0], [8, -7, 0, 0], [2, 2, 0, 0]]


WRONG_TEACHERS = {
    "narrow": ({"teacher": [[1], [2], [3]]}, "line 1: teacher is 3 x 1; the loss reads 2 values for each of 3 tokens"),
    "one for each": ({"teacher": [1, 2, 3]}, "line 1: teacher is 3; the loss reads 2 values"),
    "ragged pairs": ({"teacher": [[1, 2], [3], [4, 5]]}, "line 1: teacher"),
    "wide where one is read": ({"weight": [[1, 2]] * 3}, "line 1: weight has 6 values for 3 tokens"),
    "above": ({"teacher": [[0, 0], [9, 1], [0, 0]]}, "line 1: teacher has token 9, and the vocabulary 9 entries"),
    "below": ({"teacher": [[0, 0], [1, -1], [0, 0]]}, "line 1: teacher has token -1, and the vocabulary 9 entries"),
    "between": ({"teacher": [[0, 0], [1, 1.5], [0, 0]]}, "line 1: teacher must be numbers of tokens"),
}


@pytest.mark.parametrize("name", [*WRONG, *WRONG_TEACHERS])
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name):
    sample, said = WRONG.get(name) or WRONG_TEACHERS[name]
    samples, asks = ((GOOD, sample), ASKS) if name in WRONG else ((TAUGHT | sample,), TEACHER)
    with pytest.raises(EppError) as caught:
        read(tmp_path, *samples, asks=asks)
    assert said in str(caught.value)
    assert str(tmp_path / "samples.jsonl") in str(caught.value)


def test_numbers_of_tokens_that_fp32_rounds_are_refused(tmp_path):
    exact, rounded = 2**24 - 1, 2**24 + 1
    found = read(tmp_path, TAUGHT | {"teacher": [[0, 0], [exact, 0], [0, 0]]}, asks=TEACHER, vocab_size=2**25)
    assert found.column("teacher", 0, 1, 2).tolist() == [[exact, 0]]
    with pytest.raises(EppError, match=f"teacher has token {rounded}, and the vocabulary {2**24} entries"):
        read(tmp_path, TAUGHT | {"teacher": [[0, 0], [rounded, 0], [0, 0]]}, asks=TEACHER, vocab_size=2**25)


def test_for_values_all_tokens_are_inputs_and_what_is_of_a_token_is_read_with_it(tmp_path):
    asks = LossColumns(("returns", "weight"), Average.SEQUENCES, {}, None, has_values=True)
    given = {"tokens": [3, 1, 4], "trained": [0, 0, 1], "returns": [5, 6, 7], "weight": 2}
    found = read(tmp_path, given, {"tokens": [8], "returns": [9], "weight": 1}, asks=asks, most_tokens=3)
    assert found.lengths.tolist() == [3, 1]
    batch = GlobalBatch(indices=(0, 1), lengths=(3, 1), dataset=found)
    arrays = (
        batch.chunk_of([Segment(0, 0, 2)], 1, of_loss=asks),
        batch.chunk_of([Segment(0, 2, 3), Segment(1, 0, 1)], 3, of_loss=asks),
    )
    assert [chunk.tokens.tolist() for chunk in arrays] == [[3, 1], [4, 8, 0]]
    assert [chunk.of_loss.weights.tolist() for chunk in arrays] == [[0, 0], [1, 1, 0]]
    assert [chunk.of_loss.columns.tolist() for chunk in arrays] == [[[5, 6], [2, 2]], [[7, 9, 0], [2, 1, 0]]]
    assert [chunk.of_loss.counts.tolist() for chunk in arrays] == [[0, 0], [1, 1, 0]]
    with pytest.raises(EppError, match="line 1 has 3 tokens, 3 positions of 2 at most"):
        read(tmp_path, given, asks=asks, most_tokens=2)
