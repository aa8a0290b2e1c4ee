"""Documents of input files as tokens: of texts, of lines of JSONL, and of conversations."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_epp.data.chat import ASSISTANT, ChatEncoder, Tokens
from megatron_epp.data.chat_fields import Fields, Message
from megatron_epp.mcore.data.encoders import Encoder
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import parse_json, shown

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")

Documents = Iterator[tuple[str, Tokens | None]]
"""Every document's origin, for messages, and tokens: none if it is empty, None if it cannot be read, which is logged."""


def files_of(inputs: Sequence[str | Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files of all inputs, a folder's files in sorted order. Raises `EppError` if there are none."""
    files = [file for path in inputs for file in _files(Path(path), suffixes)]
    if not files:
        raise EppError(
            f"no documents: no file ending in {', '.join(suffixes)} under {', '.join(map(str, inputs))}; see --suffixes"
        )
    return files


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise EppError(f"--input {path} does not exist")
    return sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())


def texts(files: Sequence[Path], encoder: Encoder, json_key: str, end: int | None) -> Documents:
    """Yield the tokens of every file, or of every line of JSONL.

    Args:
        files: a file without a suffix of JSONL is one document.
        encoder: converts text to tokens.
        json_key: key of the text of a line.
        end: token that ends every document that is not empty; None adds none.

    Raises:
        EppError: a line has no such text.
    """
    ending = np.array([] if end is None else [end], dtype=np.int64)
    for origin, raw in _raw_texts(files, json_key):
        try:
            ids = encoder.encode(raw)
        except UnicodeDecodeError as error:
            _log_unreadable(origin, error)
            yield origin, None
            continue
        yield origin, Tokens(np.concatenate((ids, ending)) if len(ids) else ids)


def _raw_texts(files: Sequence[Path], json_key: str) -> Iterator[tuple[str, bytes]]:
    for file in files:
        if file.suffix not in JSONL_SUFFIXES:
            yield str(file), file.read_bytes()
            continue
        for origin, line in _lines(file):
            record = parse_json(line, origin, with_nan=True)
            text = record.get(json_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise EppError(f"{origin} has no text under {json_key!r}; name the key with --json-key")
            # JSON can hold half a surrogate pair, which has no UTF-8 form; byte-level tokens can carry it all the same.
            yield origin, text.encode("utf-8", errors="surrogatepass")


def chats(files: Sequence[Path], encoder: ChatEncoder, json_key: str | None, end: int | None, fields: Fields) -> Documents:
    """Yield the tokens of the conversation of every line of JSONL, with the mask of trained tokens.

    Args:
        files: JSONL, whatever their suffix.
        encoder: converts conversations to tokens.
        json_key: key of the messages of a line; None: `messages`, or ShareGPT's `conversations` in a file that has them.
        end: token that ends every conversation, trained if its last message is; None adds none.
        fields: counts of what the template leaves out, to which the counts of every conversation are added.

    Raises:
        EppError: a line has no conversation, or the template does not take it; or no conversation of all has a trained message.
    """
    roles, told = set[str](), set[Path]()
    for file in files:
        for origin, line in _lines(file):
            record = parse_json(line, origin, with_nan=True)
            key = json_key or _key_of(record)
            if key == _SHAREGPT and json_key is None and file not in told:
                told.add(file)
                logger.info("%s has conversations as ShareGPT has them: `from` is read as role, `value` as content", file)
            messages = messages_of(record, key, origin)
            roles.update(message["role"] for message in messages)
            try:
                json.dumps(record, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                _log_unreadable(origin, error)
                yield origin, None
                continue
            if not messages:
                yield origin, Tokens(np.empty(0, dtype=np.int64))
                continue
            try:
                ids, trained = encoder.encode(messages, record.get("tools"))
                encoder.count_fields(fields, messages, record.get("tools"))
            except EppError as error:
                raise error.within(before=f"{origin}: ", after="; see --chat-template and --train-on") from error
            assert trained is not None  # of a conversation
            if end is not None:
                ids = np.append(ids, end)
                trained = np.append(trained, np.uint8(messages[-1]["role"] in encoder.roles))
            yield origin, Tokens(ids, trained)
    if roles and not roles & set(encoder.roles):
        raise EppError(
            f"no message is of the roles that are trained ({', '.join(encoder.roles)}): the messages are of "
            f"{', '.join(sorted(roles))}; name the roles to train with --train-on"
        )


def messages_of(record: object, key: str, origin: str) -> list[Message]:
    """Return the messages of a line of JSONL.

    Args:
        record: value of the line.
        key: of the messages.
        origin: file and number of the line, for errors.

    Raises:
        EppError: there are none under the key, or one has no role, or neither content nor calls of tools.
    """
    messages = record.get(key) if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise EppError(f"{origin} has no list of messages under {key!r}; name the key with --json-key")
    messages = [_from_sharegpt(message) for message in messages]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EppError(f"{origin}: message {number} has no text under 'role': {shown(message)}")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise EppError(f"{origin}: message {number} has no text under 'content': {shown(message)}")
    return messages


_SHAREGPT = "conversations"
"""Key of the messages of a line in ShareGPT's format."""
_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""Roles of messages by the names in ShareGPT's format, where a message has `from` and `value`."""


def _key_of(record: object) -> str:
    """Return the key under which a line has its messages, if none is named."""
    return _SHAREGPT if isinstance(record, dict) and "messages" not in record and _SHAREGPT in record else "messages"


def _from_sharegpt(message: object) -> object:
    """Return a message of ShareGPT's format with role and content; any other value unchanged."""
    if not isinstance(message, dict) or "role" in message or "content" in message or not isinstance(message.get("value"), str):
        return message
    role = message.get("from")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return rest | {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": message["value"]}


def _lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the origin and the bytes of every line that is not empty. Raises `EppError` if the file is not text."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if b"\0" in line:
                raise EppError(_not_text(file, number))
            if number == 1 and line.lstrip().startswith(b"["):
                remedy = f"jq -c '.[]' {shlex.quote(str(file))} > documents.jsonl"
                raise EppError(
                    f"{file}:1 begins a list in JSON, not JSONL, which has an object in each line; make that by: {remedy}"
                )
            if line.strip():
                yield f"{file}:{number}", line


def _not_text(file: Path, number: int) -> str:
    """Describe the likely format of a file in which a line has bytes that no text has."""
    if file.suffix in (".bin", ".idx") and all(file.with_suffix(suffix).exists() for suffix in (".bin", ".idx")):
        pair = file.with_suffix("")
        return f"{file} is not JSONL but one of a pair of documents that are prepared already: train with --data-path {pair}"
    return f"{file}:{number} is not JSONL: it has bytes that no text in UTF-8 has; give text, with an object in each line"


def _log_unreadable(origin: str, error: UnicodeError) -> None:
    logger.warning("left out %s: it is not UTF-8 (%s)", origin, getattr(error, "reason", error))
