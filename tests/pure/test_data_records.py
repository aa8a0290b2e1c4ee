"""Data before planning: records of JSONL and Parquet, their tokenizer, lengths that are drawn, masks, and samples shown."""

import argparse
import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_epp.data import records, sequence_lengths, token_record
from megatron_epp.data.chat import example_lines
from megatron_epp.data.indexed_documents import cut_documents, open_mask, stream_lengths
from megatron_epp.data.token_record import SUFFIX, Tokenizer, TokenRecord, check_kind, check_tokenizer, digest_of, load_record
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.problem import Lengths
from megatron_epp.tools.cli.lengths import limited
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


@pytest.mark.parametrize(
    ("corpus", "median", "longest"),
    [("wikipedia", 344, 269428), ("code", 2200, 1 << 24), ("chat", 700, 1 << 24), ("agents", 630, 1 << 24)],
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


def test_articles_files_of_code_chats_and_agents_are_distributed_as_is_documented():
    found = sequence_lengths.wikipedia(400_000, 7)
    for share, length in sequence_lengths.WIKIPEDIA[1:-2]:  # behind them are a few dozen
        assert np.quantile(found, share) == pytest.approx(length, rel=0.1, abs=2)
    found = sequence_lengths.code(20_000, 7)
    assert (found >= 16384).mean() == pytest.approx(0.05 + 0.95 * 0.053, abs=0.01)
    found = sequence_lengths.chat(400_000, 7)
    assert found.mean() == pytest.approx(1280, rel=0.02)
    assert (found > 9000).mean() == pytest.approx(0.01, rel=0.05)
    assert 20 < (found > 40_000).sum() < 80  # as one in 10,000 is
    found = sequence_lengths.agents(20_000, 7)
    assert (found > 5000).mean() == pytest.approx(0.99 / 16, abs=0.01)
    assert np.median(found[found > 5000]) == pytest.approx(60_000, rel=0.15)


VALUES = [0, 1, 1, 0, 0, 1, 0]


def write(folder, values):
    np.asarray(values, dtype=np.uint8).tofile(folder / "corpus.mask")


@pytest.mark.parametrize("mmap", [True, False])
def test_parts_of_a_mask_are_read_as_they_are_and_pickled_without_values(tmp_path, mmap):
    assert open_mask(str(tmp_path / "corpus"), len(VALUES), mmap) is None, "there may be none"
    write(tmp_path, VALUES)
    mask = open_mask(str(tmp_path / "corpus"), len(VALUES), mmap)
    pickled = pickle.dumps(mask)
    assert len(pickled) < 300
    for start, end in [(0, 7), (2, 5), (6, 7), (3, 3)]:
        assert mask.read(start, end).tolist() == pickle.loads(pickled).read(start, end).tolist() == VALUES[start:end]


@pytest.mark.parametrize("num_bytes", [0, 6, 8, 14])
def test_a_mask_of_another_size_is_refused_with_both_numbers(tmp_path, num_bytes):
    write(tmp_path, [0] * num_bytes)
    says = rf"corpus\.mask has {num_bytes} bytes and .*corpus\.bin has 7 tokens, .* remove the mask to train on all tokens"
    assert re.search(says, refusal(open_mask, str(tmp_path / "corpus"), 7))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_value_other_than_0_and_1_is_refused_with_its_token_where_it_is_read(tmp_path, mmap):
    write(tmp_path, [0, 1, 1, 0, 49, 1, 50])
    mask = open_mask(str(tmp_path / "corpus"), 7, mmap)
    assert mask.read(0, 4).tolist() == [0, 1, 1, 0]
    with pytest.raises(EppError, match=r"corpus\.mask has 49 for token 4, where 1 \(trained\) or 0 \(not\) is expected; make"):
        mask.read(2, 7)


def naive(num_tokens, limit, long_documents):
    """Document, first token and positions of every sequence."""
    starts = [(document, range(0, tokens - 1, limit), tokens) for document, tokens in enumerate(num_tokens)]
    most = 1 if long_documents == "truncate" else None
    return [(at, first, min(limit, tokens - 1 - first)) for at, firsts, tokens in starts for first in firsts[:most]]


def random_documents(seed):
    draw = np.random.RandomState(seed)
    return np.maximum(0, draw.randint(-3, 60, size=draw.randint(1, 40))).astype(np.int64)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
@pytest.mark.parametrize("limit", [1, 2, 7, 58, 59, 1000])
def test_sequences_are_the_naive_ones(limit, long_documents):
    for seed in range(20):
        num_tokens = random_documents(seed)
        found = cut_documents(num_tokens, limit, long_documents)
        places = [(*found.locate(i), int(found.lengths[i])) for i in range(len(found))]
        assert places == naive(num_tokens.tolist(), limit, long_documents)
        assert found.num_long == sum(tokens - 1 > limit for tokens in num_tokens)
        assert found.num_left_out == sum(max(0, n - 1) for n in num_tokens) - sum(found.lengths)
        assert found.lengths.dtype == np.int32


def test_an_index_takes_eight_bytes_of_a_document_and_four_of_a_further_sequence_or_of_documents_some_of_which_are_skipped():
    sequences = cut_documents(np.full(1000, 41, dtype=np.int64), 10)
    assert len(sequences) == 4000
    assert sequences.documents is None
    assert sequences.lengths.nbytes + sequences.ends.nbytes == 8 * 1000 + 4 * 3000
    sequences = cut_documents(np.array([1] + [41] * 1000), 60)
    assert sequences.ends is None
    assert sequences.lengths.nbytes + sequences.documents.nbytes == 8 * 1000


def test_a_stream_has_samples_of_one_length_of_all_tokens():
    assert stream_lengths(np.array([5, 0, 8]), 4).tolist() == [4, 4, 4]
    assert stream_lengths(np.array([5, 0, 7]), 4).tolist() == [4, 4]
    with pytest.raises(EppError, match="4 tokens of all documents are less than a sample of 4"):
        stream_lengths(np.array([4]), 4)


def test_commands_plan_a_stream_of_the_documents_as_training_does():
    """Documents of so many positions have a token more each."""
    assert limited(Lengths((3, 4, 5)), argparse.Namespace(context=4, documents="stream")).lengths == (4, 4, 4)
