"""What a chat template leaves out of messages is counted, by functions that stand in for templates."""

import json

import pytest

from megatron_epp.data.chat_fields import TOOLS, Fields, count_fields, with_texts
from megatron_epp.plan.errors import EppError

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
    assert fields.present == {"content": 3, "reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert fields.lost == {"reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert (fields.num_empty, fields.num_null) == (1, 0)
    assert counted(content, roles=("user", "tool")).num_empty == 0, "they are not trained"
    of_fields, of_answers = fields.warnings(["assistant"])
    assert "name in 1 of 1, reasoning_content in 2 of 2, tool_calls in 1 of 1, weight in 1 of 1;" in of_fields
    assert of_answers.startswith("1 messages of assistant are trained as empty ones")


def test_fields_that_it_renders_are_not():
    fields = counted(everything)
    assert fields.lost == {"weight": 1}
    assert fields.num_empty == 0


def test_a_template_that_renders_a_field_of_some_messages_loses_it_of_the_others():
    """As those do that leave out the reasoning of earlier answers."""
    fields = counted(lambda one, number: one.get("content", "") + (one.get("reasoning_content", "") if number > 1 else ""))
    assert (fields.lost["reasoning_content"], fields.present["reasoning_content"]) == (1, 2)


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


@pytest.mark.parametrize(("shows", "lost"), [(True, {}), (False, {TOOLS: 1})])
def test_tools_that_are_not_rendered_are_counted(shows, lost):
    fields, rendering = Fields(), Rendering(content)
    count_fields(fields, CHAT[:1], ["assistant"], lambda messages: rendering(messages, "tools" * shows), rendering)
    assert fields.present == {TOOLS: 1}
    assert fields.lost == lost


def test_a_plain_content_that_is_not_rendered_is_lost_and_one_that_is_changed_is_not():
    chat = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    fields = counted(lambda one, number: "" if number else one["content"].upper(), chat)
    assert (fields.lost, fields.present, fields.num_empty) == ({"content": 1}, {"content": 2}, 1)
    first_part = counted(lambda one, _: "" if one["content"][0] == "{" else ".", chat)  # which fails without any
    assert first_part.lost == {"content": 2}


def test_fields_that_are_printed_as_python_writes_them_are_counted_and_json_is_not():
    fields = counted(lambda one, _: str(one))
    assert fields.printed == {"tool_calls": 1}
    (warning,) = fields.warnings(["assistant"])
    assert "as Python writes them: tool_calls in 1 of 1" in warning
    assert not counted(everything).printed


PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "bc", "cache": None}]
PICTURE = {"type": "image_url", "image_url": {"url": "x.png"}}


def of_parts(message, _):
    """Render a content as templates do that take parts."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<picture>") for part in content)


def texts_of(body, *contents):
    fields = Fields()
    messages = [{"role": "user", "content": content} for content in contents]
    return [message["content"] for message in with_texts(fields, messages, Rendering(body))], fields


@pytest.mark.parametrize(
    "body",
    [
        lambda one, _: str(one["content"]),
        lambda one, _: str([{key: value for key, value in part.items() if value} for part in one["content"]]),
        lambda one, _: json.dumps(one["content"]),
        lambda one, _: "".join(map(str, one["content"])),
        lambda one, _: one["content"] + "",
    ],
)
def test_texts_of_parts_are_joined_for_templates_that_would_print_the_list_or_fail(body):
    contents, fields = texts_of(body, PARTS, ["d", "e"], "f")
    assert contents[0] == "a bc"
    assert contents[2] == "f"
    assert fields.num_joined in (1, 2)
    (warning,) = fields.warnings(["user"])
    assert warning.startswith(f"{fields.num_joined} messages have a list of parts as content")
    with pytest.raises(EppError, match="message 2 has a part of type image_url, and the chat template takes text alone"):
        texts_of(body, "f", [PARTS[0], PICTURE])


def test_templates_that_take_parts_get_them_and_what_is_no_text_is_told():
    contents, fields = texts_of(of_parts, [*PARTS, PICTURE], "f")
    assert contents == [[*PARTS, PICTURE], "f"]
    (warning,) = fields.warnings(["user"])
    assert "parts that are no text (1 of type image_url)" in warning


def test_conversations_without_further_fields_are_rendered_once_and_others_a_few_times():
    fields = Fields()
    plain, calling = Rendering(content), Rendering(everything)
    count_fields(fields, [{"role": role, "content": "x"} for role in ("user", "assistant")] * 50, ["assistant"], plain, None)
    count_fields(fields, CHAT[1:4] * 50, ["assistant"], calling, None)
    count_fields(fields, CHAT[1:4] * 50, ["assistant"], plain, None)
    assert (calling.num_calls, plain.num_calls) == (2, 4)
