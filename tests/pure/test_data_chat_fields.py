"""What a chat template leaves out of messages is counted, by functions that stand in for templates."""

import json

import pytest

from megatron_epp.data.chat_fields import TOOLS, Fields, count_fields

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CHAT = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so", "reasoning_content": "because"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "name": "f"},
    {"role": "assistant", "content": "one", "reasoning_content": "as told", "weight": 0},
]


class Rendering:
    """Stand-in for a chat template: an end of every message, and in front of it what `body` makes of message and index."""

    def __init__(self, body):
        self.body, self.num_calls = body, 0

    def __call__(self, messages, tools=""):
        self.num_calls += 1
        return tools + "".join(f"{self.body(message, number)}." for number, message in enumerate(messages))


def content(message, _):
    return message.get("content", "")


def everything(message, _):
    if any(call["type"] != "function" for call in message.get("tool_calls", ())):
        raise ValueError("no call of a function")
    return json.dumps({key: value for key, value in message.items() if key != "weight"})


def counted(body, messages=CHAT, roles=("assistant",)):
    fields = Fields()
    count_fields(fields, messages, roles, Rendering(body), None)
    return fields


def test_fields_that_a_template_ignores_are_counted_by_name_and_answers_without_text_of_their_own_too():
    fields = counted(content)
    assert fields.given == {"content": 3, "reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert fields.lost == {"reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert (fields.num_empty, fields.num_null) == (1, 0)
    assert list(fields.warnings(["assistant"])) == [
        "the chat template leaves out fields that messages have: name in 1 of 1, reasoning_content in 2 of 2, tool_calls in 1 "
        "of 1, weight in 1 of 1; no token tells what they say. Give a chat template that renders them, or put "
        "them into the content",
        "1 messages of assistant are trained as empty ones: the chat template renders nothing of them but what it puts around "
        "every message. Leave them out, or give a template that renders their fields",
    ]


def test_fields_that_it_renders_are_not():
    fields = counted(everything)
    assert fields.lost == {"weight": 1}
    assert fields.num_empty == 0


def test_a_template_that_renders_a_field_of_some_messages_loses_it_of_the_others():
    """As those do that leave out the reasoning of earlier answers."""
    fields = counted(lambda one, number: one.get("content", "") + (one.get("reasoning_content", "") if number > 1 else ""))
    assert (fields.lost["reasoning_content"], fields.given["reasoning_content"]) == (1, 2)


def test_a_template_that_refuses_other_values_or_no_value_renders_the_field():
    def strict(message, _):
        if message.get("name") not in ("f", None) or (message["role"] == "tool" and "name" not in message):
            raise ValueError("who?")
        return message.get("content", "")

    assert "name" not in counted(strict).lost


def test_a_content_that_gives_way_to_calls_is_lost():
    both = [{"role": "assistant", "content": "I look it up", "tool_calls": [CALL]}]
    fields = counted(lambda one, _: str(one["tool_calls"]) if "tool_calls" in one else one["content"], both)
    assert fields.lost == {"content": 1}
    assert fields.num_empty == 0


@pytest.mark.parametrize(
    ("answer", "num_empty", "num_null"), [(" ", 1, 0), (None, 1, 1), ([{"type": "text", "text": "x"}], 0, 0)]
)
def test_answers_without_text_are_counted_and_null_as_content_where_it_becomes_text(answer, num_empty, num_null):
    fields = counted(lambda one, _: str(one["content"]), [{"role": "assistant", "content": answer}])
    assert (fields.num_empty, fields.num_null) == (num_empty, num_null)
    assert sum("null as content" in warning for warning in fields.warnings(["assistant"])) == num_null


def test_only_the_roles_that_are_trained_have_empty_answers():
    assert counted(content, roles=("user", "tool")).num_empty == 0


@pytest.mark.parametrize(("shows", "lost"), [(True, {}), (False, {TOOLS: 1})])
def test_tools_that_are_not_rendered_are_counted(shows, lost):
    fields, rendering = Fields(), Rendering(content)
    count_fields(fields, CHAT[:1], ["assistant"], lambda messages: rendering(messages, "tools" * shows), rendering)
    assert fields.given == {TOOLS: 1}
    assert fields.lost == lost


def test_conversations_without_further_fields_are_not_rendered_again_and_others_a_few_times():
    fields = Fields()
    plain, calling = Rendering(content), Rendering(everything)
    count_fields(fields, [{"role": role, "content": "x"} for role in ("user", "assistant")] * 50, ["assistant"], plain, None)
    count_fields(fields, CHAT[1:4] * 50, ["assistant"], calling, None)
    count_fields(fields, CHAT[1:4] * 50, ["assistant"], plain, None)
    assert (calling.num_calls, plain.num_calls) == (2, 3)
