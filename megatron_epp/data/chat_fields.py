"""Counts of the fields of messages that a chat template leaves out, or prints as no model has read them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_epp.data.records import without_nulls
from megatron_epp.plan.errors import EppError

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Function from messages to the text that a template makes of them; raises any error that the template does."""

TOOLS = "tools (of lines)"  # name under which the descriptions of tools of conversations are counted


@dataclass(slots=True)
class Fields:
    # Messages that have a field with a value, by its name; the role is none, and the content is counted only of messages with
    # further fields, or if it is not rendered as it is. `TOOLS` counts conversations.
    present: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)  # of these, messages whose field the template does not render
    # Of these, those that the template prints as Python writes lists and dictionaries
    printed: Counter[str] = field(default_factory=Counter)
    # Parts of contents that are no text, by type, which the template takes
    parts: Counter[str] = field(default_factory=Counter)
    num_joined: int = 0  # messages whose content is a list of texts, which the template does not take, so that they are joined
    num_empty: int = 0  # messages that are trained although nothing of them is rendered
    num_null: int = 0  # messages whose content is null and that the template renders as text

    def warnings(self, roles: Sequence[str]) -> Iterator[str]:
        """Yield what is lost or no text, in a line each, where messages of these roles are trained."""
        if self.lost:
            todo = "Give a chat template that renders them, or put them into the content"
            shares = f"{self._shares(self.lost)}; no token tells what they say"
            yield f"the chat template leaves out fields that messages have: {shares}. {todo}"
        if self.printed:
            todo = "Give a chat template that prints them by `tojson`, or put text into the fields"
            shares = f"{self._shares(self.printed)}; no model has read such text"
            yield f"the chat template prints fields as Python writes them: {shares}. {todo}"
        if self.parts:
            counts = ", ".join(f"{count:,} of type {kind}" for kind, count in sorted(self.parts.items()))
            yield f"contents have parts that are no text ({counts}): the tokens are what the chat template writes for them"
        if self.num_joined:
            why = "the chat template takes text alone: their texts are joined"
            yield f"{self.num_joined:,} messages have a list of parts as content, and {why}"
        if self.num_empty:
            why = "the chat template renders nothing of them but what it puts around every message"
            todo = "Leave them out, or give a template that renders their fields"
            yield f"{self.num_empty:,} messages of {', '.join(roles)} are trained as empty ones: {why}. {todo}"
        if self.num_null:
            what = 'the chat template makes text of it (as a rule the word None): give "" instead'
            yield f"{self.num_null:,} messages have null as content, and {what}"

    def _shares(self, counts: Counter[str]) -> str:
        return ", ".join(f"{name} in {counts[name]:,} of {self.present[name]:,}" for name in sorted(counts))


def with_texts(fields: Fields, messages: Sequence[Message], render: Render) -> Sequence[Message]:
    """Return messages whose contents the template takes: where it would print a list of parts as such, or fails by it, their
    texts are joined and counted. Raises `EppError` if a part is no text, and the template takes no parts.
    """
    lists = [number for number, message in enumerate(messages) if isinstance(message.get("content"), list)]
    if not lists:
        return messages
    try:
        text = render(messages)
        refused = [number for number in lists if _is_printed(messages[number]["content"], text, as_json=True)]
    except Exception:  # whatever the template raises, as one that adds other texts to the content does
        refused = lists
    parts = (part for number in lists if number not in refused for part in messages[number]["content"])
    fields.parts.update(_type_of(part) for part in parts if _text_of(part) is None)
    for number in refused:
        texts = [_text_of(part) for part in messages[number]["content"]]
        if None in texts:
            kind = _type_of(messages[number]["content"][texts.index(None)])
            raise EppError(f"message {number + 1} has a part of type {kind}, and the chat template takes text alone")
        messages = _with(messages, number, "content", "".join(filter(None, texts)))
    fields.num_joined += len(refused)
    return messages


def _type_of(part: Any) -> str:
    return str(part.get("type") if isinstance(part, dict) else type(part).__name__)


def _text_of(part: Any) -> str | None:
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        part = part.get("text")
    return part if isinstance(part, str) else None


def _is_printed(value: Any, text: str, *, as_json: bool = False) -> bool:
    """Return True if a text has a list or a dictionary, or one inside it, as Python writes it, or JSON if that counts, too."""
    if not isinstance(value, dict | list) or not value:
        return False
    versions = value, without_nulls(value)  # Hugging Face removes nulls
    pythons = set(map(repr, versions))
    jsons = {json.dumps(version, ensure_ascii=False, default=str) for version in versions}
    if any(form in text for form in (pythons | jsons if as_json else pythons - jsons)):
        return True
    return any(_is_printed(part, text, as_json=as_json) for part in (value.values() if isinstance(value, dict) else value))


def count_fields(
    fields: Fields,
    messages: Sequence[Message],
    roles: Collection[str],
    render: Render,
    without_tools: Render | None,
    first: int = 0,
    tools: object = None,
) -> None:
    """Add a conversation's counts, from the message `first` on, which has not been counted with an earlier part of it.

    Conversations are rendered once, and again only if messages have more fields than role and content: with marks instead of
    their texts, and where no mark is found, without these fields, of all messages at once and then of fewer and fewer.
    """
    whole, counted = render(messages), list(enumerate(messages))[first:]
    items = [(number, name) for number, message in counted for name in _fields_of(message, whole)]
    lost = _lost(messages, items, whole, render)
    nulls = [number for number, message in counted if message.get("content", "") is None]
    fields.num_null += sum(_differs(render, _with(messages, number, "content", ""), whole) for number in nulls)
    if without_tools is not None and first == 0:
        fields.present[TOOLS] += 1
        fields.lost.update([] if _differs(without_tools, messages, whole) else [TOOLS])
        fields.printed.update([TOOLS] if _is_printed(tools, whole) else [])
    fields.present.update(name for _, name in items)
    fields.lost.update(name for _, name in lost)
    fields.printed.update(name for number, name in items if _is_printed(messages[number][name], whole))
    numbered = {number for number, name in items if (number, name) not in lost}
    for number, message in counted:
        has_text = content.strip() if isinstance(content := message.get("content"), str) else content
        is_told = number in numbered or (has_text and (number, "content") not in lost)
        fields.num_empty += message["role"] in roles and not is_told


def marked(message: Message, mark: str) -> Message:
    texts = {name: _marked(value, mark) for name, value in message.items() if name != "role" and value is not None}
    return {**message, "content": mark, **texts}


def _fields_of(message: Message, whole: str) -> list[str]:
    """Return the names of a message's fields with a value, but the role; none if only its content is, rendered as it is."""
    names = [name for name, value in message.items() if name != "role" and value is not None and value not in ("", [], {})]
    return [] if names == ["content"] and (_says(message, whole) or not isinstance(message["content"], str)) else names


def _lost(messages: Sequence[Message], items: list[tuple[int, str]], whole: str, render: Render) -> set[tuple[int, str]]:
    """Return which fields, by number of the message and name, change nothing of the rendered text."""
    marks = {item: f"zq{at}qz" for at, item in enumerate(items) if item[1] != "content"}
    changed = list(messages)
    for (number, name), mark in marks.items():
        changed[number] = {**changed[number], name: _marked(changed[number][name], mark)}
    try:
        text = render(changed) if marks else ""
    except Exception:  # a template may want other values: then fields are left out in turn
        text = ""

    unseen = [item for item in items if not (marks[item] in text if item in marks else _says(messages[item[0]], whole))]
    return set(_unchanged(messages, unseen, whole, render))


def _says(message: Message, whole: str) -> bool:
    return isinstance(content := message.get("content"), str) and content.strip() in whole


def _marked(value: Any, mark: str) -> Any:
    """Return a value with a mark instead of every text but the types of parts and calls, by which templates know them."""
    if isinstance(value, Mapping):
        return {key: part if key == "type" else _marked(part, mark) for key, part in value.items()}
    if isinstance(value, list):
        return [_marked(part, mark) for part in value]
    return mark if isinstance(value, str) else value


def _unchanged(messages: Sequence[Message], items: list[tuple[int, str]], whole: str, render: Render) -> list[tuple[int, str]]:
    """Return the fields without which, or with another content, the text is the same."""
    fewer: Sequence[Message] = messages
    for number, name in items:
        fewer = _with(fewer, number, name, "zq" if name == "content" else None)  # without any some templates fail
    if not items or not _differs(render, fewer, whole):
        return items
    if len(items) == 1:
        return []
    half = len(items) // 2
    return [item for part in (items[:half], items[half:]) for item in _unchanged(messages, part, whole, render)]


def _with(messages: Sequence[Message], number: int, name: str, value: object) -> list[Message]:
    changed = {key: other for key, other in messages[number].items() if key != name} | ({} if value is None else {name: value})
    return [*messages[:number], changed, *messages[number + 1 :]]


def _differs(render: Render, messages: Sequence[Message], whole: str) -> bool:
    try:
        return render(messages) != whole
    except Exception:  # whatever the template raises without a field that it needs
        return True
