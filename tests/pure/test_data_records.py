"""Records from JSONL and Parquet, and the record of which tokenizer made tokens and which ones a run may have for them."""

import bz2
import gzip
import io
import json
import lzma
import re
import sys
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_epp.data import records, token_record
from megatron_epp.data.token_record import SUFFIX, Tokenizer, TokenRecord, check_kind, check_tokenizer, digest_of, load_record
from megatron_epp.plan.errors import EppError
from tests.support.calls import refusal

ROWS = [{"text": "h\u00e9llo"}, {"text": "b\nc", "n": 1}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def by_zstd(raw):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": by_zstd}


def read(path):
    return list(records.records(path))


def written(path, raw):
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines_are_those_of_the_file_that_is_compressed(tmp_path, suffix):
    plain = written(tmp_path / "in.jsonl", LINES)
    compressed = written(tmp_path / f"in.jsonl.{suffix}", COMPRESS[suffix](LINES))
    wrongly_named = written(tmp_path / "named.jsonl", COMPRESS[suffix](LINES))
    assert [record.value for record in read(plain)] == ROWS
    assert [record.value for record in read(compressed)] == [record.value for record in read(wrongly_named)] == ROWS
    assert records.suffix_of(compressed) == ".jsonl"
    assert records.has_records(compressed)
    assert [record.origin for record in read(compressed)] == [f"{compressed}:1", f"{compressed}:2"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_is_compressed_and_cut_short_or_damaged_is_refused(tmp_path, suffix):
    cut = written(tmp_path / f"cut.jsonl.{suffix}", COMPRESS[suffix](LINES * 100)[:-9])
    says = rf"cut\.jsonl\.{suffix} is damaged or cut short: (gzip|bzip2|xz|zstd) cannot decompress"
    with pytest.raises(EppError, match=says):
        read(cut)


def test_rows_of_parquet_are_records_without_nulls_whatever_the_files_name(tmp_path):
    rows = [{"text": "a", "more": {"x": 1, "y": None}, "list": [{"z": None}]}, {"text": None, "more": None, "list": None}]
    path = tmp_path / "in.data"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert records.has_records(path)
    assert read(path) == [(f"{path}:1", {"text": "a", "more": {"x": 1}, "list": [{}]}), (f"{path}:2", {})]


def test_damaged_parquet_is_refused(tmp_path):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    written(path, path.read_bytes()[:-20])
    with pytest.raises(EppError, match=r"in\.parquet is damaged or cut short: pyarrow cannot read it \(.+\)"):
        read(path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    compressed = written(tmp_path / "in.jsonl.zst", by_zstd(LINES))
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for file, what in ((path, "in.parquet, which is Parquet,"), (compressed, "reading a file compressed by zstd")):
        assert f"{what} needs pyarrow: pip install 'megatron-epp[parquet]'" in refusal(read, file)


def archive(kind):
    raw = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(raw, "w") as file:
            file.writestr("a.txt", "a")
    else:
        with tarfile.open(fileobj=raw, mode=kind) as file:
            file.addfile(tarfile.TarInfo("a.txt"))
    return raw.getvalue()


BINARY = {
    "zip": (archive("zip"), "a ZIP archive, as .docx", "unpack"),
    "tar": (archive("w"), "a tar archive", "unpack it first"),
    "tar.gz": (archive("w:gz"), "a tar archive", "unpack it first"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "a PDF", "extract its text first"),
    "arrow": (b"ARROW1\0\0" + bytes(9), "an Arrow table", "write it as Parquet or JSONL"),
    "UTF-16": ("{}".encode("utf-16"), "text in UTF-16", "convert it first: iconv -f UTF-16 -t UTF-8"),
    "picture": (b"\x89PNG\r\n\x1a\n\0", "a PNG picture", "only text can be prepared"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "a pointer to a file", "git lfs pull"),
}


@pytest.mark.parametrize("kind", BINARY)
def test_what_is_binary_is_refused_by_what_it_is(tmp_path, kind):
    content, what, remedy = BINARY[kind]
    path = written(tmp_path / "in.jsonl", content)
    said = refusal(read, path)
    assert (said.startswith(f"{path} is {what}"), remedy in said) == (True, True), said


@pytest.mark.parametrize("text", ["%PDF-1.7 begins a PDF", "BZh9 is no archive", "PK\x03\x04 in text", "GIF89a"])
def test_text_that_begins_as_a_binary_file_does_is_text(tmp_path, text):
    with records.opened(written(tmp_path / "in.txt", text.encode())) as stream:
        assert stream.read().decode() == text


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EppError, match=r"cannot read .*nothing\.jsonl: No such file or directory"):
        read(tmp_path / "nothing.jsonl")


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
        ("", ""), ("[]", ""), ("{}", ""), ("not json", ""), ('{"schema": "other", "version": 1}', ""),
        ({"version": 2}, "schema .* version 2, where this reads"),
        ({"max_token": "256"}, "max_token: '256' is not a whole number"),
        ({"num_tokens": -1}, "num_tokens: -1 is not a whole number from 0"), ({"flags": None}, "flags is missing"),
        ({"flags": "\x1b[2J"}, "flags: .* without control characters"),
        ({"tokenizer": []}, r"tokenizer is \[\], which is not a JSON object"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_or_has_another_field_is_refused_with_its_path(tmp_path, content, told):
    path = tmp_path / f"corpus{SUFFIX}"
    record().save(str(path))
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    said = refusal(load_record, str(tmp_path / "corpus"))
    assert re.search(rf"corpus\.tokenizer\.json does not say which tokenizer .*{told}", said)
    assert "`megatron-epp prepare`" in said


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
        (record(), GPT2), (record(), replace(LLAMA, digest="another")), (record(), replace(BYTES, vocab_size=128256)),
        (record(BYTES, 256), LLAMA), (record(BYTES, 256), replace(BYTES, vocab_size=256)),
        (record(), replace(LLAMA, vocab_size=128000)),
        (record(replace(LLAMA, digest=None)), replace(GPT2, digest=None, vocab_size=200000)),
    ],
)  # fmt: skip
def test_another_tokenizer_is_refused_by_name_in_one_line(made, run):
    expected = f"documents/text has tokens of {made.tokenizer}, and this run's tokenizer is {run}: train with {FLAGS}"
    assert refusal(check_tokenizer, "documents/text", made, run).startswith(expected)


def test_ends_of_documents_must_agree_only_where_they_are_looked_for():
    made, run = record(BYTES, 256), replace(BYTES, vocab_size=258, eod=257)
    says = r"documents of corpus end with token 256, .* ends them with 257, .*; leave out eod_mask_loss, or use"
    check_tokenizer("corpus", made, run)
    with pytest.raises(EppError, match=says):
        check_tokenizer("corpus", made, run, masks_eod=True)
    check_tokenizer("corpus", made, BYTES, masks_eod=True)


def test_flags_alone_tell_text_from_bytes_and_ids():
    check_kind("corpus", record(), "HuggingFaceTokenizer", "another")
    check_kind("corpus", record(BYTES, 256), "NullTokenizer", None)
    with pytest.raises(EppError, match=r"tokens of NullTokenizer bytes .* tokenizer is HuggingFaceTokenizer m: train with"):
        check_kind("corpus", record(BYTES, 256), "HuggingFaceTokenizer", "m")
    with pytest.raises(EppError, match="this run's tokenizer is NullTokenizer: train with --tokenizer-type Hugging"):
        check_kind("corpus", record(), "NullTokenizer", None)


def test_an_id_outside_the_vocabulary_is_refused_with_its_position():
    for inside in ([0, 256], []):
        token_record.check_ids("corpus", np.array(inside, dtype=np.uint16), 257)
    for outside, ids in ((-1, np.array([5, -1, 7], np.int32)), (257, np.array([5, 257, 7], np.uint16))):
        with pytest.raises(EppError, match=rf"corpus has token {outside}, .* of 257.*after 11 tokens of corpus\.bin"):
            token_record.check_ids("corpus", ids, 257, first=10)


def test_a_digest_is_of_what_a_text_becomes_without_what_is_put_around_it():
    def words(text):
        return [sum(word.encode()) for word in text.split()]

    expected = digest_of(words)
    assert len(expected) == 16
    assert digest_of(lambda text: [-1, *words(text), -2]) == expected
    assert digest_of(lambda text: [1 + each for each in words(text)]) != expected
    assert digest_of(lambda text: [int(word) for word in text.split(" ")]) is None


def test_digests_do_not_change_between_releases():
    """Later releases read the records of earlier ones: the text stays, and how its ids are told."""
    assert digest_of(lambda text: list(text.encode())) == "9adc72149678a1d3"
