"""Records are read from JSONL, compressed or not, and from Parquet; what is neither is refused by what it is."""

import bz2
import gzip
import io
import json
import lzma
import sys
import tarfile
import zipfile

import pyarrow
import pyarrow.parquet
import pytest

from megatron_epp.data import records
from megatron_epp.plan.errors import EppError

ROWS = [{"text": "h\u00e9llo"}, {"text": "b\nc", "n": 1}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def by_zstd(raw):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": by_zstd}


def read(path):
    return list(records.records(path, lambda kind, number: f"{path}: {kind} {number}"))


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
    assert [record.origin for record in read(compressed)] == [f"{compressed}: line 1", f"{compressed}: line 2"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_is_compressed_and_cut_short_or_damaged_is_refused(tmp_path, suffix):
    whole = COMPRESS[suffix](LINES * 100)
    cut = written(tmp_path / f"cut.jsonl.{suffix}", whole[:-9])
    with pytest.raises(
        EppError, match=rf"cut\.jsonl\.{suffix} is damaged or cut short: (gzip|bzip2|xz|zstd) cannot decompress"
    ):
        read(cut)


def test_rows_of_parquet_are_records_without_nulls_whatever_the_files_name(tmp_path):
    rows = [{"text": "a", "more": {"x": 1, "y": None}, "list": [{"z": None}]}, {"text": None, "more": None, "list": None}]
    path = tmp_path / "in.data"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert records.has_records(path)
    assert read(path) == [(f"{path}: row 1", {"text": "a", "more": {"x": 1}, "list": [{}]}), (f"{path}: row 2", {})]


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
    with pytest.raises(EppError, match=r"in\.parquet, which is Parquet, needs pyarrow: pip install 'megatron-epp\[parquet\]'"):
        read(path)
    with pytest.raises(
        EppError, match=r"reading a file compressed by zstd needs pyarrow: pip install 'megatron-epp\[parquet\]'"
    ):
        read(compressed)


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
    with pytest.raises(EppError) as refused:
        read(path)
    assert str(refused.value).startswith(f"{path} is {what}")
    assert remedy in str(refused.value)


@pytest.mark.parametrize("text", ["%PDF-1.7 begins a PDF", "BZh9 is no archive", "PK\x03\x04 in text", "GIF89a"])
def test_text_that_begins_as_a_binary_file_does_is_text(tmp_path, text):
    with records.opened(written(tmp_path / "in.txt", text.encode())) as stream:
        assert stream.read().decode() == text


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(EppError, match=r"cannot read .*nothing\.jsonl: No such file or directory"):
        read(tmp_path / "nothing.jsonl")
