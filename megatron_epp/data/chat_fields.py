"""Counts of what a chat template leaves out of messages: fields that it ignores, and answers without text of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""Function from messages to the text that a template makes of them; raises any error that the template does."""

TOOLS = "tools (of lines)"
"""Name under which the descriptions of tools of conversations are counted."""


@dataclass(slots=True)
class Fields:
    """Counts over conversations.

    Attributes:
        given: messages that have a field with a value, by its name; the role is none, and the content is counted only of
            messages with further fields. `TOOLS` counts conversations.
        lost: of these, messages whose field the template does not render.
        num_empty: messages that are trained although nothing of them is rendered.
        num_null: messages whose content is null and that the template renders as text.
    """

    given: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    num_empty: int = 0
    num_null: int = 0

    def warnings(self, roles: Sequence[str]) -> Iterator[str]:
        """Yield what is lost, in a line each; `roles` are the roles whose messages are trained."""
        if self.lost:
            counts = (f"{name} in {self.lost[name]:,} of {self.given[name]:,}" for name in sorted(self.lost))
            yield (
                f"the chat template leaves out fields that messages have: {', '.join(counts)}; no token tells what they say. "
                "Give a chat template that renders them, or put them into the content"
            )
        if self.num_empty:
            yield (
                f"{self.num_empty:,} messages of {', '.join(roles)} are trained as empty ones: the chat template renders "
                "nothing of them but what it puts around every message. Leave them out, or give a template that renders their "
                "fields"
            )
        if self.num_null:
            yield (
                f"{self.num_null:,} messages have null as content, and the chat template makes text of it (as a rule the word "
                'None): give "" instead'
            )


def count_fields(
    fields: Fields, messages: Sequence[Message], roles: Collection[str], render: Render, without_tools: Render | None
) -> None:
    """Add a conversation's counts.

    Conversations are rendered again only if messages have more fields than role and content: once with marks instead of
    their texts, and where no mark is found, without these fields, of all messages at once and then of fewer and fewer.

    Args:
        fields: counts to add to.
        messages: of the conversation, which the template renders.
        roles: whose messages are trained.
        render: renders messages, with the conversation's tools.
        without_tools: the same without tools; None for a conversation that has none.
    """
    found = [(number, name) for number, message in enumerate(messages) for name in _fields_of(message)]
    nulls = [number for number, message in enumerate(messages) if message.get("content", "") is None]
    lost: set[tuple[int, str]] = set()
    if found or nulls or without_tools is not None:
        whole = render(messages)
        lost = _lost(messages, found, whole, render)
        fields.num_null += sum(_differs(render, _with(messages, number, "content", ""), whole) for number in nulls)
        if without_tools is not None:
            fields.given[TOOLS] += 1
            fields.lost[TOOLS] += not _differs(without_tools, messages, whole)
    fields.given.update(name for _, name in found)
    fields.lost.update(name for _, name in lost)
    fields.lost = +fields.lost
    told = {number for number, name in found if (number, name) not in lost}
    for number, message in enumerate(messages):
        is_told = number in told or (_has_text(message.get("content")) and (number, "content") not in lost)
        fields.num_empty += message["role"] in roles and not is_told


def _fields_of(message: Message) -> list[str]:
    """Return the names of a message's fields that have a value, without the role; none if only its content has one."""
    names = [name for name, value in message.items() if name != "role" and value is not None and value not in ("", [], {})]
    return [] if names == ["content"] else names


def _has_text(content: object) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)


def _lost(messages: Sequence[Message], found: list[tuple[int, str]], whole: str, render: Render) -> set[tuple[int, str]]:
    """Return which fields, by number of the message and name, change nothing of the rendered text."""
    marks = {item: f"zq{at}qz" for at, item in enumerate(found) if item[1] != "content"}
    marked = list(messages)
    for (number, name), mark in marks.items():
        marked[number] = {**marked[number], name: _marked(marked[number][name], mark)}
    try:
        text = render(marked) if marks else ""
    except Exception:  # a template may want other values: then fields are left out in turn
        text = ""

    def is_seen(item: tuple[int, str]) -> bool:
        return marks[item] in text if item in marks else _says(item, messages, whole)

    return set(_unchanged(messages, [item for item in found if not is_seen(item)], whole, render))


def _says(item: tuple[int, str], messages: Sequence[Message], whole: str) -> bool:
    """Return True if a message's content is in the rendered text as it is."""
    content = messages[item[0]][item[1]]
    return isinstance(content, str) and content.strip() in whole


def _marked(value: Any, mark: str) -> Any:
    """Return a value with a mark instead of every text but the word by which calls of functions are known."""
    if isinstance(value, Mapping):
        return {key: _marked(part, mark) for key, part in value.items()}
    if isinstance(value, list):
        return [_marked(part, mark) for part in value]
    return mark if isinstance(value, str) and value != "function" else value


def _unchanged(messages: Sequence[Message], items: list[tuple[int, str]], whole: str, render: Render) -> list[tuple[int, str]]:
    """Return the fields without which the text is the same."""
    if not items:
        return []
    fewer: Sequence[Message] = messages
    for number, name in items:
        fewer = _with(fewer, number, name, "" if name == "content" else None)
    if not _differs(render, fewer, whole):
        return items
    if len(items) == 1:
        return []
    half = len(items) // 2
    return [item for part in (items[:half], items[half:]) for item in _unchanged(messages, part, whole, render)]


def _with(messages: Sequence[Message], number: int, name: str, value: object) -> list[Message]:
    """Return the messages with another value in one message's field; None removes the field."""
    changed = {key: one for key, one in messages[number].items() if key != name} | ({} if value is None else {name: value})
    return [*messages[:number], changed, *messages[number + 1 :]]


def _differs(render: Render, messages: Sequence[Message], whole: str) -> bool:
    """Return True if messages are rendered as another text, or cannot be."""
    try:
        return render(messages) != whole
    except Exception:  # whatever the template raises without a field that it needs
        return True
