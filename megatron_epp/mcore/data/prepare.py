"""Conversion of texts and chats to a ``.bin``/``.idx`` pair. Megatron is imported only when there is something to write."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron_epp.data.chat import ChatCounts, ChatEncoder, Tokens, example_lines
from megatron_epp.data.indexed_documents import MASK_SUFFIX
from megatron_epp.data.records import RECORD_SUFFIXES
from megatron_epp.data.token_record import SUFFIX, Tokenizer, TokenRecord
from megatron_epp.mcore.data.encoders import BYTES, Encoder
from megatron_epp.mcore.data.inputs import SUFFIXES, Documents, chats, files_of, texts
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.writing import sync

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Trained:
    """Counts of the trained tokens of conversations: those that are labels; the first one of a document never is."""

    roles: tuple[str, ...]
    num_tokens: int
    num_documents_without: int  # documents without any, which are in the pair all the same
    counts: ChatCounts
    example: Sequence[str]  # lines of the first document with trained tokens, as text


@dataclass(frozen=True, slots=True)
class Summary:
    prefix: str  # path of the pair, without suffix
    lengths: np.ndarray  # int64, tokens of each document, including its end-of-document token
    num_empty: int  # number of documents left out because they have no tokens
    num_unreadable: int  # number of documents left out because they are not UTF-8 (byte-level tokens take any document)
    record: TokenRecord
    trained: Trained | None = None  # None for texts, all of whose tokens are trained

    def __str__(self) -> str:
        lengths = self.lengths
        lines = [
            f"{self.prefix}.bin, .idx: {len(lengths):,} documents, {lengths.sum():,} tokens of {self.record.tokenizer}"
            f" (left out: {self.num_empty:,} empty, {self.num_unreadable:,} not UTF-8)",
            f"tokens per document: min {lengths.min():,}, median {int(np.median(lengths)):,}, max {lengths.max():,}",
            *histogram(lengths),
            f"train on them with: --data-path {self.prefix} {self.record.flags}",
        ]
        if self.trained is not None:
            lines[1:1] = _lines_of(self.prefix, self.trained, int(lengths.sum()))
        return "\n".join(lines)


def _lines_of(prefix: str, trained: Trained, num_tokens: int) -> Iterator[str]:
    share = f"{trained.num_tokens:,} tokens ({trained.num_tokens / num_tokens:.1%})"
    without = f"conversations without any: {trained.num_documents_without:,} (they take time and train nothing)"
    yield f"{prefix}{MASK_SUFFIX}: {share} are trained, messages of {', '.join(trained.roles)}; {without}"
    answers = trained.counts
    if answers.num_split:
        yield (
            f"{answers.num_split:,} conversations are {answers.num_samples:,} samples, since the chat template renders earlier "
            f"answers otherwise than the last: each answer has its history with it, {answers.num_repeated:,} tokens "
            f"({answers.num_repeated / num_tokens:.1%}) more than in one sample; --chat-turns last trains the last answer alone"
        )
    yield from trained.example


def prepare(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    *,
    encoder: Encoder = BYTES,
    append_eod: bool | None = None,
    suffixes: Sequence[str] | None = None,
    json_key: str | None = None,
    chat: ChatEncoder | None = None,
) -> Summary:
    """Write the documents of `inputs` as ``output_prefix.bin`` and ``output_prefix.idx``, with a record of the tokenizer.

    Existing files are replaced. The record (`TokenRecord`) is a third file, and the mask of trained tokens of conversations
    (`TokenMask`) a fourth; one of an earlier pair is removed if texts replace it. All files are written under temporary names
    and renamed when complete: on any error, earlier files stay as they were. Raises `EppError` if there is nothing to read, a
    line is malformed, or a file cannot be read or written.

    Args:
        inputs: folders (every file with one of `suffixes` below them is a document, in sorted order), files of JSONL or Parquet
            (every line or row is an object whose `json_key` is a document), and other files (each one document). Compressed
            files are read as what they hold.
        append_eod: end every document with the tokenizer's `eod`; by default texts, and of conversations those whose last
            answer has no stop token.
        suffixes: by default `SUFFIXES`, for conversations `RECORD_SUFFIXES`.
        json_key: by default ``text``, for conversations ``messages``.
        chat: converts conversations to tokens, with the tokenizer of `encoder`: every line or row of every file is one.
    """
    eod = encoder.tokenizer.eod
    if eod is None and (append_eod or (append_eod is None and chat is None)):
        raise EppError("this tokenizer has no end-of-document token; pass --no-append-eod")
    prefix, counts = str(output_prefix), ChatCounts()
    files = files_of(inputs, suffixes or (SUFFIXES if chat is None else RECORD_SUFFIXES))
    if chat is None:
        documents = texts(files, encoder, json_key or "text", None if append_eod is False else eod)
    else:
        chat = replace(chat, eod=eod, append_eod=append_eod)
        documents = chats(files, chat, json_key, counts)
    partial, written = f"{prefix}.partial-{os.getpid()}", (".bin", SUFFIX, *((MASK_SUFFIX,) if chat else ()), ".idx")
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        try:
            summary = _write(documents, prefix, partial, encoder, chat, counts)
            summary.record.save(partial + SUFFIX)
            for suffix in written:
                sync(partial + suffix)
            _rename(partial, prefix, written)
        finally:
            for suffix in written:
                Path(partial + suffix).unlink(missing_ok=True)
    except OSError as error:
        raise EppError(f"{str(error.filename or prefix).replace(partial, prefix)}: {error.strerror or error}") from error
    for warning in (*counts.fields.warnings(() if chat is None else chat.roles), *counts.warnings()):
        logger.warning("%s", warning)
    return summary


def refuse_existing(prefix: str) -> None:
    """Raise `EppError` if a prefix has a pair already, or a file of one."""
    for suffix in (".bin", ".idx"):
        if os.path.exists(prefix + suffix):
            raise EppError(f"{prefix}{suffix} exists already: add --overwrite to replace it, or give another --output-prefix")


def _rename(partial: str, prefix: str, suffixes: Sequence[str]) -> None:
    """Replace an earlier pair, the index first out and last in, so that none is of another .bin; restore it if that fails."""
    aside, moved, placed = f"{partial}.before", list[str](), list[str]()
    try:
        for suffix in (".idx", ".bin", SUFFIX, MASK_SUFFIX):
            if os.path.exists(prefix + suffix):
                os.replace(prefix + suffix, aside + suffix)
                moved.append(suffix)
        for suffix in suffixes:
            os.replace(partial + suffix, prefix + suffix)
            placed.append(suffix)
    except BaseException:
        for suffix in reversed(placed):
            os.unlink(prefix + suffix)
        for suffix in reversed(moved):
            os.replace(aside + suffix, prefix + suffix)
        raise
    for suffix in moved:
        os.unlink(aside + suffix)


def _write(
    documents: Documents, prefix: str, partial: str, encoder: Encoder, chat: ChatEncoder | None, counts: ChatCounts
) -> Summary:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    num_empty = num_unreadable = 0
    example, last_log, tokenizer = list[str](), time.monotonic(), encoder.tokenizer
    with ExitStack() as opened:
        builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
        opened.callback(builder.data_file.close)
        of_mask = None if chat is None else opened.enter_context(open(partial + MASK_SUFFIX, "wb"))
        writer = _Writer(builder, of_mask, tokenizer)
        for origin, tokens in documents:
            if tokens is None or not len(tokens.ids):
                num_unreadable, num_empty = num_unreadable + (tokens is None), num_empty + (tokens is not None)
                continue
            writer.add(origin, tokens)
            decode, mask = None if chat is None else chat.decode, tokens.trained
            if not example and decode is not None and mask is not None and mask.any():
                what = f"{len(tokens.ids):,} tokens, what is marked is trained (\\n is a line break)"
                example = [f"first sample, from {origin}: {what}", *example_lines(tokens.ids, mask, decode)]
            if time.monotonic() - last_log > _LOG_EVERY_SECONDS:
                last_log = time.monotonic()
                done = f"{len(writer.lengths):,}", f"{sum(writer.lengths):,}"
                logger.info("prepared %s documents, %s tokens; now at %s", *done, origin)
        if not writer.lengths:
            raise EppError(f"no documents: all {num_empty + num_unreadable} in the input are empty or not UTF-8")
        if chat is not None and not any(writer.num_trained):
            todo = "check the chat template's {% generation %} (--chat-template), or --train-on"
            roles = f"there are messages of {', '.join(chat.roles)}: {todo}"
            raise EppError(f"no token of {len(writer.lengths):,} conversations is trained, though {roles}")
        writer.builder.finalize(f"{partial}.idx")
    lengths = np.asarray(writer.lengths, dtype=np.int64)
    record = TokenRecord(encoder.tokenizer, encoder.flags, len(lengths), int(lengths.sum()), writer.max_token)
    num_trained = writer.num_trained
    trained = None if chat is None else Trained(chat.roles, sum(num_trained), num_trained.count(0), counts, example)
    return Summary(prefix, lengths, num_empty, num_unreadable, record, trained)


@dataclass(slots=True)
class _Writer:
    """Open files of a pair, and counts of tokens, of those trained as labels, and the largest id."""

    builder: Any
    mask: BinaryIO | None
    tokenizer: Tokenizer
    lengths: list[int] = field(default_factory=list)
    num_trained: list[int] = field(default_factory=list)
    max_token: int = 0

    def add(self, origin: str, tokens: Tokens) -> None:
        self.max_token = max(self.max_token, int(tokens.ids.max()))
        if self.max_token >= self.tokenizer.vocab_size:
            size = self.tokenizer.vocab_size
            raise EppError(f"{origin} has token {self.max_token}, outside the tokenizer's vocabulary of {size}")
        ids = tokens.ids.astype(self.builder.dtype)
        self.builder.add_document(ids, [len(ids)])
        self.lengths.append(len(ids))
        if self.mask is not None:
            assert tokens.trained is not None
            self.mask.write(tokens.trained.astype(np.uint8).tobytes())
            self.num_trained.append(int(tokens.trained[1:].sum(dtype=np.int64)))


def histogram(lengths: np.ndarray) -> list[str]:
    """Return lines with the number of documents, and their share of all tokens, in bins of length that grow fourfold."""
    bins = np.log2(lengths).astype(int) // 2
    counts, tokens = np.bincount(bins), np.bincount(bins, weights=lengths)
    lines = [f"{'tokens':>23}  {'documents':>11}  of all tokens"]
    for number in range(bins.min(), len(counts)):
        bar = "#" * int(np.ceil(_BAR_WIDTH * counts[number] / counts.max()))
        share = tokens[number] / tokens.sum()
        lines.append(f"{4**number:>10,} - {4 ** (number + 1) - 1:>10,}  {counts[number]:>11,}  {share:>12.1%}  {bar}".rstrip())
    return lines
