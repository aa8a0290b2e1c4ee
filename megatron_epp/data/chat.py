"""Conversion of conversations to tokens by a chat template, with the mask of the tokens that are trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_epp.data.chat_fields import Fields, Message, count_fields
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import one_line

ASSISTANT = "assistant"
"""Role of the messages that models learn to write, and whose tokens templates can mark."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Start of the part of a chat template that the model writes, by which tokenizers make a mask of their own."""

Ids = NDArray[np.int64]


class ApplyTemplate(Protocol):
    """Function that applies a chat template as `apply_chat_template` of Hugging Face tokenizers does."""

    def __call__(self, conversation: Sequence[Message], chat_template: str, **options: Any) -> Any: ...


class Tokens(NamedTuple):
    """Token ids of a document, and which of them are trained.

    Attributes:
        ids: integers [tokens].
        trained: uint8 [tokens], 1 for tokens that are trained as labels; None if all are.
    """

    ids: NDArray[np.integer[Any]]
    trained: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Conversion of a conversation to tokens, and to a mask of the tokens that are trained: the messages of some roles.

    The mask is the tokenizer's own if the template marks what the assistant writes (``{% generation %}``) and only that is
    trained. Otherwise the tokens of the conversation up to a message and up to the one before it give the message's tokens.
    The generation prompt, which a template puts in front of an assistant's answer, is not trained; the text behind one is.

    Attributes:
        apply: applies the template.
        template: the chat template, in Jinja.
        roles: roles whose messages are trained.
    """

    apply: ApplyTemplate
    template: str
    roles: tuple[str, ...] = (ASSISTANT,)

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Tokens:
        """Return the tokens of a conversation of at least one message.

        Args:
            messages: have a `role` each.
            tools: descriptions of functions, for templates that list them.

        Raises:
            EppError: the template refuses the conversation, or is not incremental.
        """
        chat = _Chat(self, messages, {"tools": tools} if tools else {})
        if self.roles == (ASSISTANT,) and _GENERATION.search(self.template):
            return chat.marked()
        return chat.by_prefixes()

    def count_fields(self, fields: Fields, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> None:
        """Add to `fields` what the template leaves out of a conversation that it has been applied to."""

        def rendered(messages: Sequence[Message], **options: Any) -> str:
            return str(self.apply(list(messages), self.template, tokenize=False, **options))

        if tools:
            count_fields(fields, messages, self.roles, partial(rendered, tools=tools), rendered)
        else:
            count_fields(fields, messages, self.roles, rendered, None)


@dataclass(frozen=True, slots=True)
class _Chat:
    encoder: ChatEncoder
    messages: Sequence[Message]
    options: Mapping[str, Any]

    def marked(self) -> Tokens:
        """Return the tokens with the mask that the tokenizer makes of the marks of the template."""
        found = self._applied(self.messages, return_assistant_tokens_mask=True)
        ids, trained = _ids(found), np.asarray(found["assistant_masks"], dtype=np.uint8)
        if trained.shape != ids.shape:
            raise EppError(f"the tokenizer's mask has {trained.size:,} values for {ids.size:,} tokens")
        return Tokens(ids, trained)

    def by_prefixes(self) -> Tokens:
        """Return the tokens, with a mask from the tokens of the conversation up to every message that is trained."""
        ids = self._up_to(len(self.messages))
        trained = np.zeros(len(ids), dtype=np.uint8)
        for number, message in enumerate(self.messages):
            if message["role"] in self.encoder.roles:
                trained[self._start(ids, number) : self._end(ids, number + 1)] = 1
        return Tokens(ids, trained)

    def _start(self, ids: Ids, number: int) -> int:
        """Return the index of the first trained token of a message: behind the generation prompt, if an assistant writes it.

        A prompt that joins with the answer's first token, or goes on in another way, is left out as far as the two agree.
        """
        if self.messages[number]["role"] != ASSISTANT or number == 0:
            return self._end(ids, number)
        prompted = _ids(self._applied(self.messages[:number], add_generation_prompt=True))
        common = _num_common(prompted, ids)
        return common if common == len(prompted) else max(common, self._end(ids, number))

    def _end(self, ids: Ids, count: int) -> int:
        """Return the number of tokens of the first `count` messages, which must be the first tokens of all messages."""
        if count in (0, len(self.messages)):
            return len(ids) if count else 0
        first = self._up_to(count)
        if (common := _num_common(first, ids)) < len(first):
            raise EppError(
                f"the chat template is not incremental: its tokens of the first {count} of {len(self.messages)} messages are "
                f"not the beginning of its tokens of all, from token {common:,} on, so tokens cannot be assigned to messages; "
                "train on the assistant alone, with a template that marks its answers with {% generation %}"
            )
        return len(first)

    def _up_to(self, count: int) -> Ids:
        return _ids(self._applied(self.messages[:count]))

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        wanted = {"tokenize": True, "return_dict": True} | dict(self.options) | options
        try:
            return self.encoder.apply(list(messages), self.encoder.template, **wanted)
        except Exception as error:  # templates raise errors of Jinja and of their own, tokenizers any other
            part = "" if len(messages) == len(self.messages) else f" the first {len(messages)} of"
            line = f" in line {error.lineno} of the template" if hasattr(error, "lineno") else ""
            raise EppError(
                f"the chat template cannot be applied to{part} its {len(self.messages)} messages ({type(error).__name__}: "
                f"{one_line(error)}{line})"
            ) from error


def _ids(found: Any) -> Ids:
    return np.asarray(found["input_ids"], dtype=np.int64)


def _num_common(a: Ids, b: Ids) -> int:
    """Return the number of tokens that two lists have in common from their beginning."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
