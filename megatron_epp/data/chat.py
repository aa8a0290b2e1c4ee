"""Conversion of conversations to tokens by a chat template, with the mask of the tokens that are trained, which is checked;
and a sample as text, with what is trained marked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_epp.data.chat_fields import Fields, Message, count_fields, marked, with_texts
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief, brief_text, one_line, printable

ASSISTANT = "assistant"  # role of the messages that models learn to write, and whose tokens templates can mark
TURNS = ("all", "last")  # which messages of the trained roles are trained
SWITCHES = ("weight", "train")
"""Fields of messages, which templates do not get, that say whether one is trained: 1 or true, 0 or false."""
OF_LINES = " (of chat_template_kwargs)"
"""Suffix of the name of a variable that a line gives to the template, where it is counted among the fields."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Start of the part of a chat template that the model writes, by which tokenizers make a mask of their own."""
_MARKS = ("zq0qz", "QZ0ZQ")  # texts that begin with different tokens, so that no text begins as both
_MOST_ENDS = 3
_MOST_PARTS, _MOST_LINES, _MOST_COLUMNS = 12, 8, 100
"""Most parts of a sample, lines of a part, and characters of a line that are shown whole."""

Ids = NDArray[np.int64]


class ApplyTemplate(Protocol):
    """Function that applies a chat template as `apply_chat_template` of Hugging Face tokenizers does."""

    def __call__(self, conversation: Sequence[Message], chat_template: str, **options: Any) -> Any: ...


class Tokens(NamedTuple):
    """Token ids of a document, and a mask of uint8, 1 for tokens that are trained as labels; None if all are."""

    ids: NDArray[np.integer[Any]]
    trained: NDArray[np.uint8] | None = None


@dataclass(slots=True)
class ChatCounts:
    """Counts of the trained answers of conversations, of the samples that these are, and of fields of messages."""

    fields: Fields = field(default_factory=Fields)
    num_answers: int = 0
    # Answers that end without a stop token, by the text of the one behind them that is trained with them
    behind: Counter[str] = field(default_factory=Counter)
    num_ended: int = 0  # answers at the end that got an end-of-document token, since they have no stop token
    open: Counter[str] = field(default_factory=Counter)  # answers without any stop token, by the text of their last tokens
    num_headers: int = 0  # answers whose header the template marks as written by the model
    num_split: int = 0  # conversations that are several samples; `num_samples` in all
    num_samples: int = 0
    num_repeated: int = 0  # tokens of these samples beyond those of the last of each conversation

    def warnings(self) -> Iterator[str]:
        total = f"of {self.num_answers:,} trained answers"
        for text, count in self.behind.most_common():
            what = f"end without a stop token, and {text} follows them, which is trained with them"
            yield f"{count:,} {total} {what}: let generation stop there"
        if self.num_ended:
            added = "an end-of-document token is added and trained"
            yield f"{self.num_ended:,} {total} are last and end without a stop token: {added}"
        if self.open:
            ends = ", ".join(f"{text!r}" for text, _ in self.open.most_common(_MOST_ENDS))
            what = f"end without a stop token (their last tokens: {ends}), so the model does not learn to stop"
            todo = "give a chat template that ends answers with a special token of the tokenizer, or make its end one"
            yield f"{self.open.total():,} {total} {what}: {todo}"
        if self.num_headers:
            why = "it is not trained, for generation gives it to the model"
            yield f"{self.num_headers:,} {total} have their header, or some of it, inside {{% generation %}}: {why}"


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """Conversion of a conversation to tokens, and to a mask of the tokens that are trained: the messages of some roles.

    The mask is the tokenizer's own if the template marks what the assistant writes (``{% generation %}``) and only that is
    trained. Otherwise the tokens of the conversation up to a message and up to the one before it give the message's tokens. Of
    an assistant's answer the generation prompt in front is not trained, and its stop token is the last that is.

    A conversation is one sample if the template renders every trained answer with what follows as it does without. Where it
    does not, as templates that leave out the reasoning of earlier answers, an answer is a sample of its own with its history.
    """

    apply: ApplyTemplate
    template: str  # the chat template, in Jinja
    # roles, turns: the messages that are trained; `turns` is one of `TURNS`
    roles: tuple[str, ...] = (ASSISTANT,)
    turns: str = "all"
    decode: Callable[[Sequence[int]], str] | None = None  # converts tokens to text; None if nothing of it is needed
    stops: frozenset[int] = frozenset()  # tokens at which generation can stop; empty for no check
    eod: int | None = None  # token that ends a document; None if there is none
    # Put it behind every sample, trained behind a trained message; None: where the last answer has no stop token
    append_eod: bool | None = False

    def encode(
        self, messages: Sequence[Message], options: Mapping[str, Any] | None = None, counts: ChatCounts | None = None
    ) -> list[Tokens]:
        """Return the samples of a conversation of at least one message, with variables of the template in `options`.

        Raises `EppError` if the template refuses it, other roles cannot be told, or a switch of `SWITCHES` has another value or
        role.
        """
        counts, options = counts or ChatCounts(), options or {}
        untrained = frozenset(number for number, message in enumerate(messages) if self._is_switched_off(message, number + 1))
        messages = [{name: value for name, value in message.items() if name not in SWITCHES} for message in messages]
        render = partial(self._rendered, options)
        chat = _Chat(self, with_texts(counts.fields, messages, render), options, untrained)
        pieces = chat.pieces()
        samples = [chat.sample(piece, counts) for piece in pieces]
        without_tools = {name: value for name, value in options.items() if name != "tools"}
        rendered_without = partial(self._rendered, without_tools) if len(without_tools) < len(options) else None
        for first, end in pairwise((0, *(piece.num_messages for piece in pieces))):
            count_fields(counts.fields, chat.messages[:end], self.roles, render, rendered_without, first, options.get("tools"))
        for name in without_tools:
            counts.fields.present[name + OF_LINES] += 1
            counts.fields.lost.update([] if re.search(rf"\b{re.escape(name)}\b", self.template) else [name + OF_LINES])
        if len(samples) > 1:
            counts.num_split += 1
            counts.num_samples += len(samples)
            counts.num_repeated += sum(len(sample.ids) for sample in samples[:-1])
        return samples

    def _is_switched_off(self, message: Message, number: int) -> bool:
        switches = {name: value for name in SWITCHES if (value := message.get(name)) is not None}
        for name, value in switches.items():
            if value not in (0, 1):  # false and true, too
                raise EppError(f"message {number} has {name} {brief(value)}; it must be 0 or false, or 1 or true")
            if value and message["role"] not in self.roles:
                why = f"messages of {brief_text(message['role'])} are not trained: train on them, or leave it out"
                raise EppError(f"message {number} has {name} {brief(value)}, and {why}")
        return not all(switches.values())

    def _rendered(self, options: Mapping[str, Any], messages: Sequence[Message]) -> str:
        return str(self.apply(list(messages), self.template, tokenize=False, **options))


class _Piece(NamedTuple):
    num_messages: int  # the first ones of a conversation
    numbers: tuple[int, ...]  # of those among them that are trained


@dataclass(slots=True)
class _Chat:
    encoder: ChatEncoder
    messages: Sequence[Message]
    options: Mapping[str, Any]
    untrained: frozenset[int] = frozenset()
    texts: dict[int, str] = field(default_factory=dict)

    def pieces(self) -> list[_Piece]:
        """Return the parts that are samples: in each the template renders all its trained messages as where they are last."""
        roles = self.encoder.roles
        numbers = [at for at, message in enumerate(self.messages) if message["role"] in roles and at not in self.untrained]
        groups: list[list[int]] = []
        for number in numbers[-1:] if self.encoder.turns == "last" else numbers:
            if groups and self._goes_on(groups[-1][-1] + 1, number + 1):
                groups[-1].append(number)
            else:
                groups.append([number])
        total = len(self.messages)
        pieces = [_Piece(group[-1] + 1, tuple(group)) for group in groups] or [_Piece(total, ())]
        if self._goes_on(pieces[-1].num_messages, total):
            pieces[-1] = pieces[-1]._replace(num_messages=total)
        return pieces

    def sample(self, piece: _Piece, counts: ChatCounts) -> Tokens:
        count, numbers = piece
        if self.encoder.roles == (ASSISTANT,) and _GENERATION.search(self.encoder.template):
            ids, trained = self._by_marks_of_template(piece, counts)
            runs = np.flatnonzero(np.diff(trained, prepend=0, append=0)).reshape(-1, 2).tolist()
        else:
            ids, runs = self._up_to(count), []
            trained = np.zeros(len(ids), dtype=np.uint8)
            for number in numbers:
                start, end = self._start(ids, number, count), self._end(ids, number + 1, count)
                trained[start:end] = 1
                if self.messages[number]["role"] == ASSISTANT and start < end:
                    runs.append([start, end])
        is_ended = self._stop(ids, trained, runs, counts)
        if self.encoder.eod is not None and (self.encoder.append_eod or is_ended):
            ids = np.append(ids, self.encoder.eod)
            is_last_trained = self.messages[count - 1]["role"] in self.encoder.roles and count - 1 not in self.untrained
            trained = np.append(trained, np.uint8(is_ended or is_last_trained))
        return Tokens(ids, trained)

    def _by_marks_of_template(self, piece: _Piece, counts: ChatCounts) -> tuple[Ids, NDArray[np.uint8]]:
        """Return the tokens with the mask that the tokenizer makes of the template's marks, without headers."""
        output = self._applied(self.messages[: piece.num_messages], return_assistant_tokens_mask=True)
        ids, trained = _ids(output), np.asarray(output["assistant_masks"], dtype=np.uint8)
        if trained.shape != ids.shape:
            raise EppError(f"the tokenizer's mask has {trained.size:,} values for {ids.size:,} tokens")
        if self.untrained:
            of_answers, count = np.zeros_like(trained), piece.num_messages
            for number in piece.numbers:
                of_answers[self._start(ids, number, count) : self._end(ids, number + 1, count)] = 1
            trained &= of_answers
        elif piece.numbers and any(message["role"] == ASSISTANT for message in self.messages[: piece.numbers[0]]):
            trained[: self._start(ids, piece.numbers[0], piece.num_messages)] = 0
        for start in np.flatnonzero(np.diff(trained, prepend=0) == 1):
            if end := self._end_of_header(ids, int(start)):
                trained[start:end] = 0
                counts.num_headers += 1
        return ids, trained

    def _end_of_header(self, ids: Ids, start: int) -> int:
        """Return the index behind a header, or what an answer has of it, that goes on at a token; 0 if none does."""
        if not len(header := np.asarray(_header(self.encoder) or (), dtype=np.int64)):
            return 0
        # Its last token may be another one, which begins as the answer does; a special token is a header's alone.
        least = 1 if int(header[0]) in self.encoder.stops else max(1, len(header) - 1)
        begins = range(max(0, start - len(header) + 1), start + 1)
        ends = (begin + common for begin in begins if (common := _num_common(header, ids[begin:])) >= least)
        return next((end for end in ends if end > start), 0)

    def _stop(self, ids: Ids, trained: NDArray[np.uint8], runs: Sequence[Sequence[int]], counts: ChatCounts) -> bool:
        """End answers, of first tokens and ones behind the last, with stop tokens in the mask; True if the last wants one."""
        encoder = self.encoder
        counts.num_answers += len(runs)
        if not encoder.stops or encoder.decode is None:
            return False
        for start, end in runs:
            if (stop := self._last_stop(ids[start:end])) is not None:
                trained[start + stop + 1 : end] = 0
            elif end < len(ids) and int(ids[end]) in encoder.stops:
                trained[end] = 1
                counts.behind[printable(encoder.decode([int(ids[end])]))] += 1
            elif end == len(ids) and encoder.eod is not None and encoder.append_eod is not False:
                counts.num_ended += encoder.append_eod is None
                return True
            else:
                counts.open[encoder.decode(ids[max(start, end - 4) : end].tolist())] += 1
        return False

    def _last_stop(self, answer: Ids) -> int | None:
        """Return the index of an answer's last token that is no white space, if it is a stop token."""
        assert self.encoder.decode is not None
        for index in reversed(range(len(answer))):
            if (token := int(answer[index])) in self.encoder.stops:
                return index
            if self.encoder.decode([token]).strip():
                break
        return None

    def _start(self, ids: Ids, number: int, count: int) -> int:
        """Return the index of a message's first trained token, behind as much of a generation prompt as its text has."""
        if self.messages[number]["role"] != ASSISTANT:
            return self._end(ids, number, count)
        common = 0
        if number and (_header(self.encoder) != () or self._is_next(number)):
            prompted = _ids(self._applied(self.messages[:number], add_generation_prompt=True))
            if (common := _num_common(prompted, ids)) == len(prompted):
                return common
        try:
            changed = ([*self.messages[:number], marked(self.messages[number], mark)] for mark in _MARKS)
            return max(common, min(_num_common(_ids(self._applied(messages)), ids) for messages in changed))
        except EppError:  # the template wants other values
            return max(common, self._end(ids, number, count))

    def _is_next(self, number: int) -> bool:
        """Return True if generation begins behind earlier messages, as behind ``[/INST]``: only white space is between."""
        try:
            head, message = self._text(number), marked(self.messages[number], _MARKS[0])
            text = str(self._applied([*self.messages[:number], message], tokenize=False))
        except EppError:  # the template wants other values, or other messages at the end
            return False
        return text.startswith(head) and text[len(head) :].lstrip().startswith(_MARKS[0])

    def _end(self, ids: Ids, number: int, count: int) -> int:
        """Return the number of tokens before a message, whose text must begin that of `count`; those that join are its own."""
        if number in (0, count):
            return len(ids) if number else 0
        if not self._goes_on(number, count):
            why = f"the chat template is not incremental: its text of the first {number} of {len(self.messages)}"
            what = f"messages is not the beginning of its text of the first {count}"
            so = f"so messages of {', '.join(self.encoder.roles)} cannot be told from others; train on the assistant alone"
            raise EppError(f"{why} {what}, {so}")
        return _num_common(self._up_to(number), ids)

    def _goes_on(self, number: int, count: int) -> bool:
        """Return True if the text of the first messages is the beginning of that of more, a last stop token aside."""
        if number == count or self._text(count).startswith(self._text(number)):
            return True
        text, stops = self._text(number).rstrip(), _stop_texts(self.encoder)
        heads = (text.removesuffix(stop).rstrip() for stop in stops if text.endswith(stop))
        return any(head.endswith(stops) and self._text(count).startswith(head) for head in heads)

    def _text(self, count: int) -> str:
        if count not in self.texts:
            self.texts[count] = str(self._applied(self.messages[:count], tokenize=False))
        return self.texts[count]

    def _up_to(self, count: int) -> Ids:
        return _ids(self._applied(self.messages[:count]))

    def _applied(self, messages: Sequence[Message], **options: Any) -> Any:
        settings = {"tokenize": True, "return_dict": True} | dict(self.options) | options
        try:
            return self.encoder.apply(list(messages), self.encoder.template, **settings)
        except Exception as error:  # templates raise errors of Jinja and of their own, tokenizers any other
            part = "" if len(messages) == len(self.messages) else f" the first {len(messages)} of"
            line = f" in line {error.lineno} of the template" if hasattr(error, "lineno") else ""
            why = f"{type(error).__name__}: {one_line(error)}{line}"
            text = f"the chat template cannot be applied to{part} its {len(self.messages)} messages ({why})"
            raise EppError(text) from error


@cache
def _header(encoder: ChatEncoder) -> tuple[int, ...] | None:
    """Return the tokens that a template puts in front of an answer that is generated; None if it does not take one message."""
    chat = _Chat(encoder, [{"role": "user", "content": "x"}], {})
    try:
        plain, prompted = chat._up_to(1), _ids(chat._applied(chat.messages, add_generation_prompt=True))
    except EppError:
        return None
    return tuple(prompted[_num_common(plain, prompted) :].tolist())


@cache
def _stop_texts(encoder: ChatEncoder) -> tuple[str, ...]:
    return () if encoder.decode is None else tuple(filter(None, (encoder.decode([stop]).strip() for stop in encoder.stops)))


def _ids(output: Any) -> Ids:
    return np.asarray(output["input_ids"], dtype=np.int64)


def _num_common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def example_lines(
    ids: NDArray[np.integer[Any]], trained: NDArray[np.uint8], decode: Callable[[Sequence[int]], str]
) -> list[str]:
    r"""Return the text of a sample, with a line break and a mark where the trained tokens begin and end.

    Line breaks of the text are written as ``\n``, so that those without are of this page.
    """
    parts = []
    for start, end in pairwise(dict.fromkeys([0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)])):
        lines = re.findall(r"[^\n]*\n|[^\n]+", decode(ids[start:end].tolist()))
        shown = _middle_out(lines, _MOST_LINES, lambda count: f"... {count:,} lines ...")
        parts.append([_line(line, bool(trained[start])) for line in shown])
    return [*chain(*_middle_out(parts, _MOST_PARTS, lambda count: [_line(f"... {count:,} parts ...", False)]))]


def _line(text: str, is_trained: bool) -> str:
    text = printable(text)
    if len(text) > _MOST_COLUMNS:
        text = f"{text[: _MOST_COLUMNS // 2]} ... {text[-_MOST_COLUMNS // 4 :]}"
    return f"{'trained' * is_trained:>9} | {text}"


def _middle_out[T](items: list[T], most: int, left_out: Callable[[int], T]) -> list[T]:
    """Return items, of too many the first and the last ones, and between them how many are left out."""
    if len(items) <= most:
        return items
    last = most // 3
    return [*items[: most - last - 1], left_out(len(items) - most + 1), *items[-last:]]
