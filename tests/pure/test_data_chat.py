"""Which tokens of a conversation are trained, by any chat template, with a stand-in for the tokenizer that applies it."""

import re

import pytest

from megatron_epp.data.chat import ChatEncoder
from megatron_epp.mcore.data.inputs import messages_of
from megatron_epp.plan.errors import EppError

USER, ANSWER, ASK, REPLY, SYSTEM = (
    {"role": role, "content": content}
    for role, content in [
        ("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fgh"), ("system", "xy"),
    ]
)  # fmt: skip
CHAT = [SYSTEM, USER, ANSWER, ASK, REPLY]
TEXT = "^s:xy.u:ab.a:cd.u:e.a:fgh."
"""Rendered: a beginning, then a role's letter, content and an end of every message."""


def header(role):
    return f"{role[0]}:"


class Template:
    """Stand-in for a tokenizer whose every character is a token; its keyword arguments are those of Hugging Face's."""

    def __init__(self, render=None, marks=False):
        self.calls = []
        self._render, self._marks = render or rendered, marks

    def __call__(self, conversation, chat_template, *, tokenize, return_dict, **options):
        assert tokenize
        assert return_dict
        assert conversation
        marked = options.pop("return_assistant_tokens_mask", False)
        prompted = options.pop("add_generation_prompt", False)
        self.calls.append((len(conversation), prompted, options))
        text = self._render(conversation, prompted)
        found = {"input_ids": [ord(character) for character in text]}
        if marked:
            assert self._marks
            found["assistant_masks"] = [int(character in "cdfgh") for character in text]
        return found


def rendered(messages, prompted):
    text = "^" + "".join(f"{header(one['role'])}{one['content']}." for one in messages)
    return text + header("assistant") * prompted


def trained_text(encoder, messages=CHAT, tools=None):
    """The trained characters, in runs."""
    ids, trained = encoder.encode(messages, tools)
    assert len(ids) == len(trained)
    assert set(trained.tolist()) <= {0, 1}
    text = "".join(chr(token) if counts else "|" for token, counts in zip(ids, trained, strict=True))
    return [run for run in re.split(r"\|+", text) if run]


def test_the_assistants_answers_are_trained_with_their_end_and_without_the_generation_prompt():
    encoder = ChatEncoder(Template(), "template")
    assert trained_text(encoder) == ["cd.", "fgh."]
    ids, _ = encoder.encode(CHAT)
    assert "".join(map(chr, ids)) == TEXT


@pytest.mark.parametrize(
    ("roles", "runs"),
    [
        (("user",), ["u:ab.", "u:e."]),
        (("user", "assistant"), ["u:ab.", "cd.u:e.", "fgh."]),
        (("system",), ["^s:xy."]),
        (("tool",), []),
    ],
)
def test_messages_of_any_roles_can_be_trained(roles, runs):
    assert trained_text(ChatEncoder(Template(), "template", roles)) == runs


def test_an_answer_that_comes_first_is_trained_from_the_beginning():
    assert trained_text(ChatEncoder(Template(), "template"), [ANSWER, ASK]) == ["^a:cd."]


def test_messages_behind_the_last_trained_one_are_not_trained():
    assert trained_text(ChatEncoder(Template(), "template"), CHAT[:4]) == ["cd."]


def test_a_prompt_that_begins_as_the_answer_and_goes_on_otherwise_is_left_out_as_far_as_it_agrees():
    def thinking(messages, prompted):
        return rendered(messages, prompted) + "<think>" * prompted

    assert trained_text(ChatEncoder(Template(thinking), "template")) == ["cd.", "fgh."]


def test_a_template_without_a_generation_prompt_trains_headers_too():
    assert trained_text(ChatEncoder(Template(lambda messages, prompted: rendered(messages, False)), "template")) == [
        "a:cd.",
        "a:fgh.",
    ]


def test_only_prefixes_in_front_of_and_behind_trained_messages_are_rendered():
    """Many templates refuse a conversation that ends with the system's message, or with two of a role."""
    template = Template()
    ChatEncoder(template, "template").encode(CHAT)
    assert {count for count, _, _ in template.calls} == {2, 3, 4, 5}


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_marks_of_the_template_are_preferred(mark):
    template = Template(marks=True)
    assert trained_text(ChatEncoder(template, f"a{mark}b")) == ["cd", "fgh"]
    assert [count for count, _, _ in template.calls] == [5]


def test_marks_serve_the_assistant_alone():
    assert trained_text(ChatEncoder(Template(), "{% generation %}", ("user",))) == ["u:ab.", "u:e."]


def test_tools_reach_the_template():
    template = Template()
    ChatEncoder(template, "template").encode(CHAT, [{"name": "f"}])
    assert all(options == {"tools": [{"name": "f"}]} for _, _, options in template.calls)


def test_a_template_that_is_not_incremental_is_refused_with_the_messages():
    def forgetting(messages, prompted):
        """Renders answers in front of the last question without their content."""
        last = max(number for number, one in enumerate(messages) if one["role"] == "user")
        kept = [one | {"content": "-"} if one["role"] == "assistant" and at < last else one for at, one in enumerate(messages)]
        return rendered(kept, prompted)

    says = r"not incremental: its tokens of the first 3 of 5 messages are not .* from token 13 on, .* \{% generation %\}"
    with pytest.raises(EppError, match=says):
        ChatEncoder(Template(forgetting), "template").encode(CHAT)


def test_what_the_template_refuses_is_said_with_its_reason():
    def picky(messages, prompted):
        if messages[-1]["role"] == "user":
            raise ValueError("roles must\nalternate")
        return rendered(messages, prompted)

    says = r"cannot be applied to the first 2 of its 5 messages \(ValueError: roles must alternate\)"
    with pytest.raises(EppError, match=says):
        ChatEncoder(Template(picky), "template").encode(CHAT)
    with pytest.raises(EppError, match=r"cannot be applied to its 2 messages \(ValueError"):
        ChatEncoder(Template(picky), "template").encode(CHAT[:2])


def test_the_line_of_a_mistake_in_the_template_is_named():
    def broken(messages, prompted):
        error = ValueError("unexpected '}'")
        error.lineno = 3
        raise error

    with pytest.raises(EppError, match=r"\(ValueError: unexpected '}' in line 3 of the template\)"):
        ChatEncoder(Template(broken), "template").encode(CHAT)


def test_a_mask_of_another_length_than_the_tokens_is_refused():
    def broken(conversation, chat_template, **options):
        return {"input_ids": [1, 2, 3], "assistant_masks": [0, 1]}

    with pytest.raises(EppError, match="the tokenizer's mask has 2 values for 3 tokens"):
        ChatEncoder(broken, "{% generation %}").encode(CHAT)


def test_messages_are_those_under_the_key():
    calling = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert messages_of({"turns": [USER, calling]}, "turns", "in:1") == [USER, calling]
    assert messages_of({"messages": []}, "messages", "in:1") == []


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], "in:3 has no list of messages under 'messages'; name the key with --json-key"),
        ({"text": "x"}, "in:3 has no list of messages under 'messages'"),
        ({"messages": "x"}, "in:3 has no list of messages under 'messages'"),
        ({"messages": [USER, "x"]}, "in:3: message 2 has no text under 'role': 'x'"),
        ({"messages": [{"speaker": "human", "text": "x"}]}, r"in:3: message 1 has no text under 'role': \{'speaker'"),
        ({"messages": [{"role": 1, "content": "x"}]}, "in:3: message 1 has no text under 'role'"),
        ({"messages": [{"role": "user"}]}, "in:3: message 1 has no text under 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "in:3: message 1 has no text under 'content'"),
    ],
)
def test_a_line_without_messages_is_refused_by_its_number(record, says):
    with pytest.raises(EppError, match=says):
        messages_of(record, "messages", "in:3")
