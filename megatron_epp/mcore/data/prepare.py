"""Conversion of text to a Megatron ``.bin``/``.idx`` pair. Megatron is imported only when there is something to write."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_epp.data.token_record import SUFFIX, TokenRecord
from megatron_epp.mcore.data.encoders import BYTES, Encoder
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import parse_json

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md", ".rst", ".py")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_LOG_EVERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Result of `prepare`.

    Attributes:
        prefix: path of the pair, without suffix.
        lengths: int64, tokens of each document, including its end-of-document token.
        num_empty: number of documents left out because they have no tokens.
        num_unreadable: number of documents left out because they are not UTF-8 (byte-level tokens take any document).
        record: record of the tokens, as written next to the pair.
    """

    prefix: str
    lengths: np.ndarray
    num_empty: int
    num_unreadable: int
    record: TokenRecord

    def __str__(self) -> str:
        lengths = self.lengths
        lines = [
            f"{self.prefix}.bin, .idx: {len(lengths):,} documents, {lengths.sum():,} tokens of {self.record.tokenizer}"
            f" (left out: {self.num_empty:,} empty, {self.num_unreadable:,} not UTF-8)",
            f"tokens per document: min {lengths.min():,}, median {int(np.median(lengths)):,}, max {lengths.max():,}",
            *histogram(lengths),
            f"train on them with: --data-path {self.prefix} {self.record.flags}",
        ]
        return "\n".join(lines)


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    encoder: Encoder = BYTES,
    append_eod: bool = True,
    suffixes: Sequence[str] = SUFFIXES,
    json_key: str = "text",
) -> Summary:
    """Write the documents of `inputs` as ``output_prefix.bin`` and ``output_prefix.idx``, with a record of the tokenizer.

    Existing files are replaced. The record (`TokenRecord`) is a third file. All files are written under temporary names and
    renamed when complete: on any error, earlier files stay as they were.

    Args:
        inputs: folders (every file with one of `suffixes` below them is a document, in sorted order), JSONL files (every line
            is an object whose `json_key` is a document), and other files (each one document).
        encoder: converts text to tokens.
        append_eod: end every document with the tokenizer's `eod`.

    Raises:
        EppError: there is nothing to read, a line is malformed, or a file cannot be read or written.
    """
    if append_eod and encoder.tokenizer.eod is None:
        raise EppError("this tokenizer has no end-of-document token; pass --no-append-eod")
    prefix = str(output_prefix)
    files = [file for path in inputs for file in _files(Path(path), suffixes)]
    if not files:
        raise EppError(
            f"no documents: no file ending in {', '.join(suffixes)} under {', '.join(map(str, inputs))}; see --suffixes"
        )
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        return _write_and_rename(files, prefix, encoder, append_eod, json_key)
    except OSError as error:
        raise EppError(f"{error.filename or prefix}: {error.strerror or error}") from error


def _write_and_rename(files: list[Path], prefix: str, encoder: Encoder, append_eod: bool, json_key: str) -> Summary:
    partial = f"{prefix}.partial-{os.getpid()}"
    try:
        summary = _write(files, prefix, partial, encoder, append_eod, json_key)
        summary.record.save(partial + SUFFIX)
        # The old index goes first: whenever this is interrupted, there is no index rather than one of another .bin.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", SUFFIX, ".idx"):
            os.replace(partial + suffix, prefix + suffix)
    finally:
        for suffix in (".bin", SUFFIX, ".idx"):
            Path(partial + suffix).unlink(missing_ok=True)
    return summary


def _write(files: list[Path], prefix: str, partial: str, encoder: Encoder, append_eod: bool, json_key: str) -> Summary:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    tokenizer = encoder.tokenizer
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    end = np.array([tokenizer.eod] if append_eod else [], dtype=np.int64)
    lengths: list[int] = []
    num_empty = num_unreadable = max_token = 0
    last_log = time.monotonic()
    try:
        for origin, raw in _documents(files, json_key):
            try:
                ids = encoder.encode(raw)
            except UnicodeDecodeError as error:
                logger.warning("left out %s: it is not UTF-8 (%s)", origin, error.reason)
                num_unreadable += 1
                continue
            if len(ids) == 0:
                num_empty += 1
                continue
            ids = np.concatenate((ids, end))
            max_token = max(max_token, int(ids.max()))
            if max_token >= tokenizer.vocab_size:
                raise EppError(f"{origin} has token {max_token}, outside the tokenizer's vocabulary of {tokenizer.vocab_size}")
            ids = ids.astype(builder.dtype)
            builder.add_document(ids, [len(ids)])
            lengths.append(len(ids))
            if time.monotonic() - last_log > _LOG_EVERY_SECONDS:
                last_log = time.monotonic()
                logger.info("prepared %s documents, %s tokens; now at %s", f"{len(lengths):,}", f"{sum(lengths):,}", origin)
        if not lengths:
            raise EppError(f"no documents: all {num_empty + num_unreadable} in the input are empty or not UTF-8")
        builder.finalize(f"{partial}.idx")
    finally:
        builder.data_file.close()
    record = TokenRecord(tokenizer, encoder.flags, len(lengths), sum(lengths), max_token)
    return Summary(prefix, np.asarray(lengths, dtype=np.int64), num_empty, num_unreadable, record)


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise EppError(f"--input {path} does not exist")
    return sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())


def _documents(files: list[Path], json_key: str) -> Iterator[tuple[str, bytes]]:
    """Yield each document's origin and bytes."""
    for file in files:
        if file.suffix not in _JSONL_SUFFIXES:
            yield str(file), file.read_bytes()
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", _text_of(f"{file}:{number}", line, json_key)


def _text_of(origin: str, line: bytes, json_key: str) -> bytes:
    record = parse_json(line, origin, with_nan=True)
    text = record.get(json_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise EppError(f"{origin} has no text under {json_key!r}; name the key with --json-key")
    # JSON can hold half a surrogate pair, which has no UTF-8 form; byte-level tokens can carry it all the same.
    return text.encode("utf-8", errors="surrogatepass")


def histogram(lengths: np.ndarray, width: int = 40) -> list[str]:
    """Return lines with the number of documents, and their share of all tokens, in bins of length that grow fourfold."""
    bins = np.log2(lengths).astype(int) // 2
    counts = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    lines = [f"{'tokens':>23}  {'documents':>11}  of all tokens"]
    for number in range(bins.min(), len(counts)):
        bar = "#" * int(np.ceil(width * counts[number] / counts.max()))
        share = tokens[number] / tokens.sum()
        lines.append(f"{4**number:>10,} - {4 ** (number + 1) - 1:>10,}  {counts[number]:>11,}  {share:>12.1%}  {bar}".rstrip())
    return lines
