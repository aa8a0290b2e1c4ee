"""Samples are read from JSONL with the columns that a loss asks for, and what is wrong with one is said with its line."""

import json

import numpy as np
import pytest

from megatron_epp.data.batch import LossColumns
from megatron_epp.data.samples import Samples, TokenSample, read_samples
from megatron_epp.losses import Average
from megatron_epp.plan import EppError

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
    "not finite": (GOOD | {"advantages": float("nan")}, "line 2: advantages has a value that is not finite"),
    "a mask of other values": (GOOD | {"trained": [0, 2, 1]}, "line 2: trained must be 0 or 1"),
    "too long": (
        GOOD | {"tokens": [1] * 10, "trained": 1, "old_logprobs": 0},
        "line 2 has 10 tokens, 9 positions of 8 at most; samples",
    ),
    "unknown token": (GOOD | {"tokens": [1, 9, 2]}, "line 2 has token 9, and the vocabulary 9 entries"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, name):
    sample, said = WRONG[name]
    with pytest.raises(EppError) as caught:
        read(tmp_path, GOOD, sample)
    assert said in str(caught.value)
    assert str(tmp_path / "samples.jsonl") in str(caught.value)


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
