"""Documents of input files as tokens: of texts, of records of JSONL or Parquet, and of conversations."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.data.chat import ASSISTANT, ChatCounts, ChatEncoder, Tokens
from megatron_epp.data.chat_fields import Message
from megatron_epp.data.records import has_records, opened, records, suffix_of
from megatron_epp.mcore.data.encoders import Encoder
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief, brief_text, parse_json

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".md", ".rst", ".py")
TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""Keys of a conversation next to its messages: functions that the assistant may call, and variables of the template."""
_NO_VARIABLES = frozenset(
    {"conversation", "messages", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_dict", "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens"}
    | {"add_generation_prompt", "continue_final_message"}
)
"""Arguments of Hugging Face's `apply_chat_template` that no line may set."""

Documents = Iterator[tuple[str, Tokens | None]]
"""Every document's origin, for messages, and tokens: none if it is empty, None if it cannot be read, which is logged."""
_SHAREGPT = "conversations"  # key of the messages of a line in ShareGPT's format
_ROLES = {"human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "assistant": ASSISTANT, "system": "system"}
"""Roles of messages by the names in ShareGPT's format, where a message has `from` and `value`."""


def files_of(inputs: Sequence[str | Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files of all inputs, folders' sorted. Raises `EppError` if there are none, or one is prepared already."""
    files = [file for path in inputs for file in _files(Path(path), suffixes)]
    for file in files:
        if file.suffix in (".bin", ".idx") and all(file.with_suffix(suffix).exists() for suffix in (".bin", ".idx")):
            pair = file.with_suffix("")
            raise EppError(f"{file} is one of a pair of documents that are prepared already: train with --data-path {pair}")
    if not files:
        where = ", ".join(map(str, inputs))
        raise EppError(f"no documents: no file ending in {', '.join(suffixes)} under {where}; see --suffixes")
    return files


def _files(path: Path, suffixes: Sequence[str]) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise EppError(f"--input {path} does not exist")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    names = {file: {suffix_of(file), file.suffix, "".join(file.suffixes[-2:])} for file in files}
    chosen = [file for file in files if not names[file].isdisjoint(suffixes)]
    if left_out := Counter(suffix_of(file) or "no suffix" for file in files if names[file].isdisjoint(suffixes)):
        counts = ", ".join(f"{count:,} of {suffix}" for suffix, count in left_out.most_common(5))
        logger.info("%s: %s files taken, and others left out (%s); see --suffixes", path, f"{len(chosen):,}", counts)
    return chosen


def texts(files: Sequence[Path], encoder: Encoder, json_key: str, end: int | None) -> Documents:
    """Yield the tokens of every text, with `end` behind those that are not empty. Raises `EppError` for records without."""
    ending = np.array([] if end is None else [end], dtype=np.int64)
    strange: list[str] = []
    for origin, raw in _raw_texts(files, json_key):
        try:
            ids = encoder.encode(raw)
        except UnicodeDecodeError as error:
            _log_unreadable(origin, error)
            yield origin, None
            continue
        yield origin, Tokens(np.concatenate((ids, ending)) if len(ids) else ids)
        try:
            raw.decode("utf-8", errors="surrogatepass")
        except UnicodeDecodeError:
            strange.append(origin)
    if strange:
        logger.warning("%s documents are no text in UTF-8, and all their bytes are tokens: %s", f"{len(strange):,}", strange[0])


def _raw_texts(files: Sequence[Path], json_key: str) -> Iterator[tuple[str, bytes]]:
    for file in files:
        if not has_records(file):
            with opened(file) as stream:
                yield str(file), stream.read()
            continue
        for origin, record in records(file):
            text = record.get(json_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise EppError(f"{origin} has no text under {json_key!r}{_keys(record)}; name the key with --json-key")
            # JSON can hold half a surrogate pair, which has no UTF-8 form; byte-level tokens can carry it all the same.
            yield origin, text.encode("utf-8", errors="surrogatepass")


def _keys(record: object) -> str:
    return f" (it has {', '.join(map(brief, [*record][:8]))})" if isinstance(record, dict) and record else ""


def chats(files: Sequence[Path], encoder: ChatEncoder, json_key: str | None, counts: ChatCounts) -> Documents:
    """Yield the tokens of the samples of every conversation, under `messages` or ShareGPT's key, with the mask of trained ones.

    Raises `EppError` if a record has no conversation, the template does not take it, or none has a trained message.
    """
    roles, announced = set[str](), set[Path]()
    for file in files:
        for origin, record in records(file):
            is_sharegpt = isinstance(record, dict) and "messages" not in record and _SHAREGPT in record
            key = json_key or (_SHAREGPT if is_sharegpt else "messages")
            if key == _SHAREGPT and json_key is None and file not in announced:
                announced.add(file)
                logger.info("%s has conversations as ShareGPT has them: `from` is read as role, `value` as content", file)
            messages, options = messages_of(record, key, origin), options_of(record, origin)
            roles.update(message["role"] for message in messages)
            try:
                json.dumps([messages, options], ensure_ascii=False, default=str).encode("utf-8")
            except UnicodeEncodeError as error:
                _log_unreadable(origin, error)
                yield origin, None
                continue
            try:
                empty = [Tokens(np.empty(0, dtype=np.int64))]
                samples = encoder.encode(messages, options, counts) if messages else empty
            except EppError as error:
                raise error.with_context(before=f"{origin}: ", after="; see --chat-template and --train-on") from error
            yield from ((origin, sample) for sample in samples)
    if roles and not roles & set(encoder.roles):
        trained, there = ", ".join(encoder.roles), ", ".join(map(brief_text, sorted(roles)))
        why = f"no message is of the roles that are trained ({trained}): the messages are of {there}"
        raise EppError(f"{why}; name the roles to train with --train-on")


def options_of(record: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a record's tools, and variables of the template, which may be JSON. Raises `EppError` for other values."""
    options = _parsed(record.get(VARIABLES), f"{origin}: {VARIABLES}") or {}
    if not isinstance(options, dict):
        raise EppError(f"{origin}: {VARIABLES} is {brief(options)}, which is not an object of variables of the template")
    if reserved := sorted(_NO_VARIABLES.intersection(options)):
        raise EppError(f"{origin}: {VARIABLES} has {', '.join(reserved)}, which is no variable of a chat template")
    tools = _parsed(record.get(TOOLS), f"{origin}: {TOOLS}") or []
    if not isinstance(tools, list):
        raise EppError(f"{origin}: {TOOLS} is {brief(tools)}, which is not a list of descriptions of functions")
    tools = [_parsed(tool, f"{origin}: tool {number}") for number, tool in enumerate(tools, start=1)]
    return options | ({TOOLS: tools} if tools else {})


def _parsed(value: Any, what: str) -> Any:
    """Return a value, from JSON if it is text that is not empty. Raises `EppError` for other text."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return parse_json(value, what)
    except EppError as error:
        is_python = re.match(r"\s*[\[{]+\s*'", value) is not None
        raise error.with_context(after="; it is as Python prints it: write it with json.dumps" * is_python) from None


def messages_of(record: object, key: str, origin: str) -> list[Message]:
    """Return the messages of a record, which may be JSON. Raises `EppError` for none, or without role, content or calls."""
    messages = record.get(key) if isinstance(record, dict) else None
    messages = parse_json(messages, f"{origin}: {key}") if isinstance(messages, str) and messages[:1] == "[" else messages
    if not isinstance(messages, list):
        raise EppError(f"{origin} has no list of messages under {key!r}{_keys(record)}; name the key with --json-key")
    messages = [_from_sharegpt(message) for message in messages]
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise EppError(f"{origin}: message {number} has no text under 'role': {brief(message)}")
        if not isinstance(message.get("content"), str | list) and not message.get("tool_calls"):
            raise EppError(f"{origin}: message {number} has no text under 'content': {brief(message)}")
    return messages


def _from_sharegpt(message: object) -> object:
    """Return a message of ShareGPT's format with role and content; any other value unchanged."""
    if not isinstance(message, dict) or "role" in message or "content" in message or not isinstance(message.get("value"), str):
        return message
    role = message.get("from")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return rest | {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": message["value"]}


def _log_unreadable(origin: str, error: UnicodeError) -> None:
    logger.warning("left out %s: it is not UTF-8 (%s)", origin, getattr(error, "reason", error))
