"""Records of files: lines of JSONL, compressed or not, and rows of Parquet. Files that are neither are refused by kind."""

from __future__ import annotations

import codecs
import importlib
import io
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import one_line, parse_json, printable

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
RECORD_SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_PARQUET = b"PAR1"
_HEAD_BYTES = 512
_ROWS = 1024  # rows of Parquet that are converted at once

_TABLE, _ARCHIVE = "write it as Parquet or JSONL", "unpack it first"
_PAGES, _MEDIA, _ENCODED = "extract its text first", "only text can be prepared", "convert it first: iconv -f UTF-16 -t UTF-8"
_KINDS: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("a ZIP archive, as .docx, .xlsx, .epub, .npz and checkpoints of torch are", _ARCHIVE),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _ARCHIVE),
    b"Rar!\x1a\x07": ("a RAR archive", _ARCHIVE),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "decompress it first, or compress it by gzip, bzip2, xz or zstd"),
    b"ARROW1": ("an Arrow table", _TABLE),
    b"\xff\xff\xff\xff": ("a stream of Arrow, as Hugging Face's save_to_disk writes it", _TABLE),
    b"ORC": ("an ORC table", _TABLE),
    b"Obj\x01": ("an Avro table", _TABLE),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", _TABLE),
    b"SQLite format 3\0": ("an SQLite database", _TABLE),
    b"\x93NUMPY": ("an array of numpy", _TABLE),
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), ("a pickle of Python", _TABLE)),
    b"%PDF-": ("a PDF", _PAGES),
    b"\xd0\xcf\x11\xe0": ("a document of old Office programs", _PAGES),
    b"\x89PNG": ("a PNG picture", _MEDIA),
    b"\xff\xd8\xff": ("a JPEG picture", _MEDIA),
    b"GIF8": ("a GIF picture", _MEDIA),
    b"RIFF": ("a WAV, AVI or WebP file", _MEDIA),
    b"ID3": ("an MP3 file", _MEDIA),
    b"\x7fELF": ("a program", _MEDIA),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), ("text in UTF-16", _ENCODED)),
}
"""What a binary file is, by its first bytes, and what to do about it."""


def _by(module: str) -> Callable[[BinaryIO], IO[bytes]]:
    """Return the function that opens a compressed file by a module of Python's, which not every Python has been built with."""
    return lambda stream: cast(IO[bytes], importlib.import_module(module).open(stream))


def _by_zstd(stream: BinaryIO) -> IO[bytes]:
    return io.BufferedReader(_pyarrow("a file compressed by zstd").CompressedInputStream(stream, "zstd"))


_DECOMPRESSORS: dict[bytes, tuple[str, Callable[[BinaryIO], IO[bytes]]]] = {
    b"\x1f\x8b": ("gzip", _by("gzip")),
    b"BZh": ("bzip2", _by("bz2")),
    b"\xfd7zXZ\0": ("xz", _by("lzma")),
    b"\x28\xb5\x2f\xfd": ("zstd", _by_zstd),
}
"""Name and function by the first bytes of a compressed file."""


class Record(NamedTuple):
    origin: str  # its file and the number of its line or row, from 1, as in ``chats.jsonl:3``
    value: Any


def suffix_of(path: Path) -> str:
    """Return a file's suffix, of a compressed file the one in front: ``.jsonl`` of ``chats.jsonl.gz``."""
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def has_records(path: Path) -> bool:
    """Return True if a file has records by its suffix, or is Parquet by its first bytes."""
    return suffix_of(path) in RECORD_SUFFIXES or is_parquet(path)


def is_parquet(path: Path) -> bool:
    try:
        with open(path, "rb") as stream:
            return stream.read(len(_PARQUET)) == _PARQUET
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed (gzip, bzip2, xz, zstd). Raises `EppError` if it is damaged, or binary of a known kind."""
    kind = ""
    try:
        with ExitStack() as stack:
            stream: IO[bytes] = stack.enter_context(open(path, "rb"))
            head = cast(io.BufferedReader, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES]
            for magic, (name, decompress) in _DECOMPRESSORS.items():
                if head.startswith(magic) and not _is_text(head):
                    kind, stream = name, stack.enter_context(decompress(cast(BinaryIO, stream)))
                    head = cast(io.BufferedReader, stream).peek(_HEAD_BYTES)[:_HEAD_BYTES]
                    break
            _refuse_binary(path, head)
            yield stream
    except EppError:
        raise
    except Exception as error:  # each decompressor raises errors of its own
        if kind and not getattr(error, "errno", None):
            raise EppError(f"{path} is damaged or cut short: {kind} cannot decompress it ({one_line(error)})") from error
        raise _unreadable(path, error) from error


def records(path: Path) -> Iterator[Record]:
    """Yield the records of JSONL, compressed or not, or Parquet, without nulls of objects. Raises `EppError` for others."""
    yield from (_rows if is_parquet(path) else _lines)(path)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _lines(path: Path) -> Iterator[Record]:
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if b"\0" in line:
                todo = "give text, with an object in each line"
                raise EppError(f"{where} is not JSONL: it has bytes that no text in UTF-8 has; {todo}")
            if number == 1 and line.lstrip().startswith(b"["):
                todo = f"make that by: jq -c '.[]' {shlex.quote(str(path))} > documents.jsonl"
                raise EppError(f"{where} begins a list in JSON, not JSONL, which has an object in each line; {todo}")
            if line.strip():
                yield Record(where, parse_json(line, where, with_nan=True))


def _rows(path: Path) -> Iterator[Record]:
    pyarrow, number = _pyarrow(f"{path}, which is Parquet,"), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(_ROWS):
                for row in batch.to_pylist(maps_as_pydicts="lossy"):
                    number += 1
                    yield Record(f"{path}:{number}", without_nulls(row))
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:  # rows that Python cannot hold, too
        raise EppError(f"{path} is damaged or cut short: pyarrow cannot read it ({one_line(error)})") from error


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise EppError(f"reading {what} needs pyarrow: pip install 'megatron-epp[parquet]'") from error
    return pyarrow


def _unreadable(path: Path, error: Exception) -> EppError:
    return EppError(f"cannot read {printable(str(path))}: {getattr(error, 'strerror', None) or one_line(error)}")


def _refuse_binary(path: Path, head: bytes) -> None:
    """Raise `EppError`, which says what to do, for a file that is known by its first bytes and is no text."""
    if head.startswith(b"version https://git-lfs.github.com/spec"):
        raise EppError(f"{path} is a pointer to a file of Git LFS, not the file: fetch it with `git lfs pull`")
    kinds = [("a tar archive", _ARCHIVE)] * (head[257:262] == b"ustar")
    kinds += [kind for magic, kind in _KINDS.items() if head.startswith(magic)]
    if kinds and not _is_text(head):
        raise EppError(f"{path} is {kinds[0][0]}, not text in UTF-8: {kinds[0][1]}")


def _is_text(head: bytes) -> bool:
    """Return True if the beginning of a file can be that of a text in UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head
