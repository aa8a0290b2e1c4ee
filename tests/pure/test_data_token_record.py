"""Which tokenizer made a file's tokens, and which tokenizers a run may have for them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_epp.data.token_record import (
    SUFFIX,
    Tokenizer,
    TokenRecord,
    check_ids,
    check_kind,
    check_tokenizer,
    digest_of,
    load_record,
)
from megatron_epp.plan.errors import EppError

LLAMA = Tokenizer("HuggingFaceTokenizer", "meta-llama/Meta-Llama-3-8B", 128256, 128001, "00c0ffee00c0ffee")
GPT2 = Tokenizer("GPT2BPETokenizer", "gpt2-vocab.json", 50257, 50256, "0ddba110ddba110")
BYTES = Tokenizer("NullTokenizer", "bytes", 257, 256, None)
FLAGS = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B"


def record(tokenizer=LLAMA, max_token=128001, flags=FLAGS):
    return TokenRecord(tokenizer, flags, num_documents=3, num_tokens=100, max_token=max_token)


def test_a_record_is_read_as_it_was_written(tmp_path):
    prefix = str(tmp_path / "corpus")
    assert load_record(prefix) is None
    for each in (record(), record(BYTES, 256)):
        each.save(prefix + SUFFIX)
        assert load_record(prefix) == each


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", ""),
        ("[]", ""),
        ("{}", ""),
        ("not json", ""),
        ('{"schema": "other", "version": 1}', ""),
        ({"version": 2}, "schema .* version 2, where this reads"),
        ({"max_token": "256"}, "max_token: '256' is not a whole number"),
        ({"num_tokens": -1}, "num_tokens: -1 is not a whole number from 0"),
        ({"flags": None}, "flags is missing"),
        ({"flags": "\x1b[2J"}, "flags: .* without control characters"),
        ({"tokenizer": []}, r"tokenizer is \[\], which is not a JSON object"),
    ],
)
def test_a_record_that_is_none_or_has_another_field_is_refused_with_its_path(tmp_path, content, told):
    path = tmp_path / f"corpus{SUFFIX}"
    record().save(str(path))
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(EppError, match=rf"corpus\.tokenizer\.json does not say which tokenizer .*{told}") as refused:
        load_record(str(tmp_path / "corpus"))
    assert "`megatron-epp prepare`" in str(refused.value)


@pytest.mark.parametrize(
    ("made", "run"),
    [
        (record(), LLAMA),
        (record(), replace(LLAMA, model="/models/llama3")),  # the same, from another place
        (record(), replace(LLAMA, vocab_size=128300)),  # with tokens added that the documents have not
        (record(BYTES, 256), replace(BYTES, model=None)),
        (record(BYTES, 256), replace(BYTES, vocab_size=512, eod=511)),
    ],
)
def test_the_same_tokenizer_is_taken(made, run):
    check_tokenizer("corpus", made, run)


@pytest.mark.parametrize(
    ("made", "run"),
    [
        (record(), GPT2),
        (record(), replace(LLAMA, digest="another")),
        (record(), replace(BYTES, vocab_size=128256)),
        (record(BYTES, 256), LLAMA),
        (record(BYTES, 256), replace(BYTES, vocab_size=256)),
        (record(), replace(LLAMA, vocab_size=128000)),
        (record(replace(LLAMA, digest=None)), replace(GPT2, digest=None, vocab_size=200000)),
    ],
)
def test_another_tokenizer_is_refused_by_name_in_one_line(made, run):
    with pytest.raises(EppError) as caught:
        check_tokenizer("documents/text", made, run)
    message = str(caught.value)
    assert message.startswith(
        f"documents/text has tokens of {made.tokenizer}, and this run's tokenizer is {run}: train with {FLAGS}"
    )
    assert "\n" not in message


def test_ends_of_documents_must_agree_only_where_they_are_looked_for():
    run = replace(BYTES, vocab_size=258, eod=257)
    check_tokenizer("corpus", record(BYTES, 256), run)
    with pytest.raises(
        EppError, match=r"documents of corpus end with token 256, .* ends them with 257, .*; leave out eod_mask_loss, or use"
    ):
        check_tokenizer("corpus", record(BYTES, 256), run, masks_eod=True)
    check_tokenizer("corpus", record(BYTES, 256), BYTES, masks_eod=True)


def test_flags_alone_tell_text_from_bytes_and_ids():
    check_kind("corpus", record(), "HuggingFaceTokenizer", "another")
    check_kind("corpus", record(BYTES, 256), "NullTokenizer", None)
    with pytest.raises(EppError, match=r"tokens of NullTokenizer bytes .* tokenizer is HuggingFaceTokenizer m: train with"):
        check_kind("corpus", record(BYTES, 256), "HuggingFaceTokenizer", "m")
    with pytest.raises(EppError, match="this run's tokenizer is NullTokenizer: train with --tokenizer-type Hugging"):
        check_kind("corpus", record(), "NullTokenizer", None)


def test_an_id_outside_the_vocabulary_is_refused_with_its_position():
    check_ids("corpus", np.array([0, 256], dtype=np.uint16), 257)
    check_ids("corpus", np.array([], dtype=np.uint16), 257)
    for outside, ids in ((-1, np.array([5, -1, 7], np.int32)), (257, np.array([5, 257, 7], np.uint16))):
        with pytest.raises(EppError, match=rf"corpus has token {outside}, .* of 257.*after 11 tokens of corpus\.bin"):
            check_ids("corpus", ids, 257, first=10)


def test_a_digest_is_of_what_a_text_becomes_without_what_is_put_around_it():
    def words(text):
        return [sum(word.encode()) for word in text.split()]

    expected = digest_of(words)
    assert expected is not None
    assert len(expected) == 16
    assert digest_of(lambda text: [-1, *words(text), -2]) == expected
    assert digest_of(lambda text: [1 + each for each in words(text)]) != expected
    assert digest_of(lambda text: [int(word) for word in text.split(" ")]) is None


def test_digests_do_not_change_between_releases():
    """Later releases read the records of earlier ones: the text stays, and how its ids are told."""
    assert digest_of(lambda text: list(text.encode())) == "9adc72149678a1d3"
