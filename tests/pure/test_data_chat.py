"""Tokens of a conversation that are trained, and what a template leaves out of messages, with stand-ins for the tokenizer."""

import json
import re
from unittest.mock import Mock

import pytest

from megatron_epp.data.chat import ChatCounts, ChatEncoder
from megatron_epp.data.chat_fields import TOOLS, Fields, count_fields, with_texts
from megatron_epp.mcore.data.inputs import messages_of
from megatron_epp.plan.errors import EppError
from tests.support.calls import refusal

TEXTS = {"system": "xy"}, {"user": "ab"}, {"assistant": "cd"}, {"user": "e"}, {"assistant": "fgh"}
CHAT = SYSTEM, USER, ANSWER, ASK, REPLY = [{"role": role, "content": text} for one in TEXTS for role, text in one.items()]
ANSWERS = "[cdfgh]"
"""Characters of answers, for templates that mark them."""
TEXT = "^s:xy.u:ab.a:cd.u:e.a:fgh."
"""Rendered: a beginning, then a role's letter, content and an end of every message."""


class Template:
    """Stand-in for a tokenizer whose every character is a token; its keyword arguments are those of Hugging Face's."""

    def __init__(self, render=None, marks=None):
        self.calls = []
        self._render, self._marks = render or rendered, marks

    def __call__(self, conversation, chat_template, *, tokenize, return_dict=False, **options):
        assert return_dict or not tokenize
        assert conversation
        marked = options.pop("return_assistant_tokens_mask", False)
        prompted = options.pop("add_generation_prompt", False)
        text = self._render(conversation, prompted)
        if not tokenize:
            return text
        self.calls.append((len(conversation), prompted, options))
        found = {"input_ids": [ord(character) for character in text]}
        if marked:
            spans = (range(*match.span()) for match in re.finditer(self._marks, text))
            marks = {at for span in spans for at in span}
            found["assistant_masks"] = [int(at in marks) for at in range(len(text))]
        return found


def rendered(messages, prompted):
    return "^" + "".join(f"{one['role'][0]}:{one['content']}." for one in messages) + "a:" * prompted


def sample_texts(encoder, messages=CHAT, options=None, counts=None):
    found = []
    for ids, trained in encoder.encode(messages, options, counts):
        assert len(ids) == len(trained)
        assert set(trained.tolist()) <= {0, 1}
        text = "".join(chr(token) if is_trained else "|" for token, is_trained in zip(ids, trained, strict=True))
        found.append(("".join(map(chr, ids)), [run for run in re.split(r"\|+", text) if run]))
    return found


def trained_text(encoder, messages=CHAT, options=None, counts=None):
    ((_, runs),) = sample_texts(encoder, messages, options, counts)
    return runs


def thinking(messages, prompted):
    """Render with a prompt that begins as an answer does, and goes on otherwise."""
    return rendered(messages, prompted) + "<think>" * prompted


def unprompted(messages, prompted):
    """Render without a generation prompt, and calls in the place of a content."""
    calls = [{"content": str(one["tool_calls"])} if "tool_calls" in one else {} for one in messages]
    return rendered([one | call for one, call in zip(messages, calls, strict=True)], False)


def instructed(messages, prompted):
    """Render as Mistral's and Llama 2's templates do: a space, and no prompt, is in front of an answer."""
    return "^" + "".join(f"[I] {one['content']} [/I]" if one["role"] == "user" else f" {one['content']}." for one in messages)


CALLING = {"role": "assistant", "content": None, "tool_calls": [{"name": "zq", "arguments": {"x": 1}}]}


@pytest.mark.parametrize(
    ("render", "roles", "messages", "runs"),
    [
        pytest.param(rendered, "assistant", CHAT, ["cd.", "fgh."], id="answers with their end"),
        pytest.param(rendered, "user", CHAT, ["u:ab.", "u:e."], id="questions"),
        pytest.param(rendered, "user assistant", CHAT, ["u:ab.", "cd.u:e.", "fgh."], id="both"),
        pytest.param(rendered, "system", CHAT, ["^s:xy."], id="system"),
        pytest.param(rendered, "tool", CHAT, [], id="a role that is not there"),
        pytest.param(rendered, "assistant", [ANSWER, ASK, REPLY], ["cd.", "fgh."], id="an answer that comes first"),
        pytest.param(rendered, "assistant", [ANSWER], ["cd."], id="an answer alone"),
        pytest.param(rendered, "assistant", CHAT[:4], ["cd."], id="a question behind the last answer"),
        pytest.param(thinking, "assistant", CHAT, ["cd.", "fgh."], id="a prompt that goes on otherwise"),
        pytest.param(unprompted, "assistant", CHAT, ["cd.", "fgh."], id="no generation prompt"),
        pytest.param(instructed, "assistant", CHAT[1:], [" cd.", " fgh."], id="the space in front of an answer"),
        pytest.param(unprompted, "assistant", [CALLING], ["zq', 'arguments': {'x': 1}}]."], id="a call that comes first"),
    ],
)
def test_messages_of_roles_are_trained_with_their_end_and_without_headers_and_prompts(render, roles, messages, runs):
    assert trained_text(ChatEncoder(Template(render), "template", tuple(roles.split())), messages) == runs


def test_only_prefixes_in_front_of_and_behind_trained_messages_are_rendered():
    """Many templates refuse a conversation that ends with the system's message, or with two of a role."""
    template = Template()
    encoder = ChatEncoder(template, "template")
    encoder.encode(CHAT)
    template.calls.clear()
    encoder.encode(CHAT)
    assert [(count, prompted) for count, prompted, _ in template.calls] == [(5, False), (2, True), (3, False), (4, True)]


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_marks_of_the_template_are_preferred(mark):
    template = Template(marks=ANSWERS)
    encoder = ChatEncoder(template, f"a{mark}b")
    assert trained_text(encoder) == ["cd", "fgh"]
    template.calls.clear()
    assert (trained_text(encoder), [count for count, _, _ in template.calls]) == (["cd", "fgh"], [5])
    assert trained_text(ChatEncoder(template, f"a{mark}b", ("user",))) == ["u:ab.", "u:e."], "they are of the assistant alone"


OFF, ON = {"weight": 0}, {"weight": 1.0, "train": True}


@pytest.mark.parametrize(
    ("switches", "runs"),
    [
        ([{}, {}, {}, {}, {}], ["cd.", "fgh."]), ([OFF, {"train": False}, ON, {"train": None}, ON], ["cd.", "fgh."]),
        ([{}, {}, OFF, {}, {}], ["fgh."]), ([{}, {}, {}, {}, {"train": False}], ["cd."]), ([{}, {}, ON | OFF, {}, OFF], []),
    ],
)  # fmt: skip
def test_messages_that_are_switched_off_are_not_trained_and_no_template_gets_the_switches(switches, runs):
    def checking(messages, prompted):
        assert all(one.keys() == {"role", "content"} for one in messages)
        return rendered(messages, prompted)

    messages = [one | switch for one, switch in zip(CHAT, switches, strict=True)]
    eod = {"eod": ord("$"), "append_eod": True}
    ended = [*runs[:-1], *(f"{run}$" if run == "fgh." else run for run in runs[-1:])]
    assert trained_text(ChatEncoder(Template(checking), "template", **eod), messages) == ended
    marking = ChatEncoder(Template(checking, marks=ANSWERS), "{% generation %}")
    assert trained_text(marking, messages) == [run.rstrip(".") for run in runs]


@pytest.mark.parametrize(
    ("number", "switch", "says"),
    [
        (3, {"weight": 0.5}, "message 3 has weight 0.5; it must be 0 or false, or 1 or true"),
        (3, {"train": "yes"}, "message 3 has train 'yes'; it must be 0"),
        (2, {"train": True}, "message 2 has train True, and messages of user are not trained: train on them"),
    ],
)
def test_switches_that_cannot_be_honoured_are_refused(number, switch, says):
    messages = [one | switch if at == number else one for at, one in enumerate(CHAT, start=1)]
    assert says in refusal(ChatEncoder(Template(), "template").encode, messages)


def test_tools_reach_the_template():
    template, counts = Template(), ChatCounts()
    encoder = ChatEncoder(template, "{{ enable_thinking }}")
    encoder.encode(CHAT, {"tools": [{"name": "f"}], "enable_thinking": False, "enable": 1}, counts)
    given = [options for _, _, options in template.calls if options]
    assert given == [{"tools": [{"name": "f"}], "enable_thinking": False, "enable": 1}] * 4
    assert counts.fields.lost == {"tools (of lines)": 1, "enable (of chat_template_kwargs)": 1}


def forgetting(messages, prompted):
    """Render answers behind the last question with a thought, and earlier ones without, as reasoning models have them."""
    last = max((number for number, one in enumerate(messages) if one["role"] == "user"), default=-1)
    thoughts = ["<t>" * (one["role"] == "assistant" and at > last) for at, one in enumerate(messages)]
    return rendered([m | {"content": t + m["content"]} for m, t in zip(messages, thoughts, strict=True)], prompted)


SPLIT = [("^s:xy.u:ab.a:<t>cd.", ["<t>cd."]), ("^s:xy.u:ab.a:cd.u:e.a:<t>fgh.", ["<t>fgh."])]


def test_every_answer_that_later_messages_change_is_a_sample_with_its_history_as_it_is_rendered_then():
    counts = ChatCounts()
    encoder = ChatEncoder(Template(forgetting), "template")
    assert (sample_texts(encoder, counts=counts), sample_texts(encoder, [*CHAT, ASK])) == (SPLIT, SPLIT)
    assert sample_texts(encoder, CHAT[:3], counts=counts) == SPLIT[:1]
    (first, _), (second, _) = SPLIT
    marking = ChatEncoder(Template(forgetting, marks=ANSWERS), "{% generation %}")
    assert sample_texts(marking) == [(first, ["cd"]), (second, ["fgh"])]
    assert (counts.num_split, counts.num_samples, counts.num_repeated) == (1, 2, len(SPLIT[0][0]))


def test_answers_that_none_of_the_later_messages_change_share_a_sample():
    chain = [USER, ANSWER, {"role": "tool", "content": "1"}, REPLY, ASK, ANSWER]
    assert sample_texts(ChatEncoder(Template(forgetting), "template"), chain) == [
        ("^u:ab.a:<t>cd.t:1.a:<t>fgh.", ["<t>cd.", "<t>fgh."]),
        ("^u:ab.a:cd.t:1.a:fgh.u:e.a:<t>cd.", ["<t>cd."]),
    ]


def test_the_last_answer_alone_can_be_trained():
    assert sample_texts(ChatEncoder(Template(forgetting), "template", turns="last")) == SPLIT[1:]
    assert sample_texts(ChatEncoder(Template(), "template", turns="last")) == [(TEXT, ["fgh."])]
    assert sample_texts(ChatEncoder(Template(marks=ANSWERS), "{% generation %}", turns="last")) == [(TEXT, ["fgh"])]


def test_a_thought_that_a_later_message_removes_is_rendered_where_it_is_trained():
    def thinking(messages, prompted):
        last = max(number for number, one in enumerate(messages) if one["role"] == "user")
        texts = [one.get("thought", "") * (at > last) + one["content"] for at, one in enumerate(messages)]
        return rendered([one | {"content": text} for one, text in zip(messages, texts, strict=True)], prompted)

    chat, counts = [USER, ANSWER | {"thought": "why"}, ASK, REPLY | {"thought": "so"}], ChatCounts()
    ChatEncoder(Template(thinking), "template").encode(chat, counts=counts)
    assert counts.fields.present["thought"] == 2
    assert not counts.fields.lost


def test_messages_of_other_roles_cannot_be_told_from_answers_that_they_change():
    assert (
        "the chat template is not incremental: its text of the first 3 of 5 messages is not the beginning of its text of the "
        "first 5, so messages of user, assistant cannot be told from others; train on the assistant alone"
    ) in refusal(ChatEncoder(Template(forgetting), "template", ("user", "assistant")).encode, CHAT)


MESSAGES = "messages"
STOPS = {"decode": lambda ids: "".join(map(chr, ids)), "stops": frozenset(map(ord, ".^"))}
"""Full stops end messages; a sign begins them in some templates."""


def unstopped(messages, prompted):
    """Render messages that the beginning of the next one ends, as GLM's templates do."""
    return "".join(f"^{one['role'][0]}:{one['content']}" for one in messages) + "^a:" * prompted


def test_a_stop_token_behind_an_answer_is_trained_with_it_and_told():
    counts = ChatCounts()
    assert trained_text(ChatEncoder(Template(unstopped), "template", **STOPS), counts=counts) == ["cd^", "fgh"]
    followed, endless = counts.warnings()
    assert followed.startswith("1 of 2 trained answers end without a stop token, and ^ follows them")
    assert endless.startswith("1 of 2 trained answers end without a stop token (their last tokens: 'fgh')")
    marking, counts = ChatEncoder(Template(marks=ANSWERS), "{% generation %}", **STOPS), ChatCounts()
    assert (trained_text(marking, counts=counts), counts.behind) == (["cd.", "fgh."], {".": 2})


def test_a_last_answer_without_a_stop_token_gets_the_end_of_a_document():
    counts = ChatCounts()
    encoder = ChatEncoder(Template(unstopped), "template", eod=ord("$"), append_eod=None, **STOPS)
    assert trained_text(encoder, counts=counts) == ["cd^", "fgh$"]
    assert trained_text(encoder, CHAT[:4]) == ["cd^"]
    assert [*counts.warnings()][1].endswith("an end-of-document token is added and trained")


@pytest.mark.parametrize("render", [rendered, lambda messages, prompted: rendered(messages, prompted).replace(".", ".\n")])
def test_the_stop_token_of_an_answer_is_trained_last_and_a_line_break_behind_it_is_not(render):
    counts = ChatCounts()
    encoder = ChatEncoder(Template(render), "template", eod=ord("$"), append_eod=None, **STOPS)
    assert (trained_text(encoder, counts=counts), counts.num_answers) == (["cd.", "fgh."], 2)
    assert not list(counts.warnings())


@pytest.mark.parametrize(
    ("marks", "prompt", "num_headers"),
    [(r"(?<=a):\w+\.", "a:", 2), (r"\^a:\w+\.", "^a:<t>", 2), (r"a:\w+\.", "^a:<t>", 2), (r"(?<=a:)\w+\.", "^a:", 0)],
)
def test_what_the_marks_have_of_a_header_is_not_trained_and_told_where_it_is_known_as_one(marks, prompt, num_headers):
    """Some prompts go on with what earlier answers do not have; a sign is a special token of headers."""

    def headed(messages, prompted):
        texts = ((prompt.partition("<")[0] if one["role"] == "assistant" else "u:", one["content"]) for one in messages)
        return "".join(f"{header}{content}." for header, content in texts) + prompt * prompted

    counts = ChatCounts()
    encoder = ChatEncoder(Template(headed, marks=marks), "{% generation %}", **STOPS)
    assert trained_text(encoder, [USER, ANSWER, ASK, REPLY], counts=counts) == ["cd.", "fgh."]
    assert counts.num_headers == num_headers
    told = "2 of 2 trained answers have their header, or some of it, inside {% generation %}"
    assert [warning.startswith(told) for warning in counts.warnings()] == [True] * (num_headers > 0)


def test_a_stop_token_behind_the_whole_conversation_does_not_make_samples_of_its_answers():
    """As some templates end what they render with that of a document; one that ends the last answer alone does."""
    ended, ending = (
        Template(lambda messages, prompted, end=end: rendered(messages, False)[:-1] + (".a:" if prompted else end))
        for end in (".$", "$")
    )
    stops = {"decode": STOPS["decode"], "stops": STOPS["stops"] | {ord("$")}}
    assert trained_text(ChatEncoder(ended, "template", **stops)) == ["cd.", "fgh.$"]
    assert [runs for _, runs in sample_texts(ChatEncoder(ending, "template", **stops))] == [["cd$"], ["fgh$"]]


def test_what_the_template_refuses_is_said_with_its_reason():
    def picky(messages, prompted):
        if messages[-1]["role"] == "user":
            raise ValueError("roles must\nalternate")
        return rendered(messages, prompted)

    (mistake := ValueError("unexpected '}'")).lineno = 3
    for render, chat, says in (
        (picky, CHAT, "cannot be applied to the first 2 of its 5 messages (ValueError: roles must alternate)"),
        (picky, CHAT[:2], "cannot be applied to its 2 messages (ValueError"),
        (Mock(side_effect=mistake), CHAT, "(ValueError: unexpected '}' in line 3 of the template)"),
    ):
        assert says in refusal(ChatEncoder(Template(render), "template").encode, chat)


def test_a_mask_of_another_length_than_the_tokens_is_refused():
    broken = Mock(return_value={"input_ids": [1, 2, 3], "assistant_masks": [0, 1]})
    assert "the tokenizer's mask has 2 values for 3 tokens" in refusal(ChatEncoder(broken, "{% generation %}").encode, CHAT)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ([], " has no list of messages under 'messages'; name the key with --json-key"),
        *((record, " has no list of messages under 'messages'") for record in ({"text": "x"}, {MESSAGES: "x"})),
        ({MESSAGES: [USER, "x"]}, ": message 2 has no text under 'role': 'x'"),
        ({MESSAGES: [{"speaker": "human", "text": "x"}]}, ": message 1 has no text under 'role': {'speaker'"),
        ({MESSAGES: [{"role": 1, "content": "x"}]}, ": message 1 has no text under 'role'"),
        *(({MESSAGES: [{"role": "user"} | no]}, ": message 1 has no text under 'content'") for no in ({}, {"content": None})),
    ],
)
def test_a_line_without_messages_is_refused_by_its_number(record, says):
    assert refusal(messages_of, record, MESSAGES, "in:3").startswith(f"in:3{says}")


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
FIELDS_CHAT = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so", "reasoning_content": "because"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "name": "f"},
    {"role": "assistant", "content": "one", "reasoning_content": "as told", "weight": 0},
]


def rendering(body):
    """Stand-in for a chat template: an end of every message, and in front of it what `body` makes of message and index."""
    return lambda messages, tools="": tools + "".join(f"{body(message, at)}." for at, message in enumerate(messages))


def content(message, _):
    return message.get("content", "")


def everything(message, _):
    if any(call["type"] != "function" for call in message.get("tool_calls", ())):
        raise ValueError("no call of a function")
    return json.dumps({key: value for key, value in message.items() if key != "weight"})


def counted(body, messages=FIELDS_CHAT, roles=("assistant",)):
    fields = Fields()
    count_fields(fields, messages, roles, rendering(body), None)
    return fields


def test_fields_that_a_template_ignores_are_counted_by_name_and_answers_without_text_of_their_own_too():
    fields = counted(content)
    assert fields.present == {"content": 3, "reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert fields.lost == {"reasoning_content": 2, "tool_calls": 1, "name": 1, "weight": 1}
    assert (fields.num_empty, fields.num_null) == (1, 0)
    assert counted(content, roles=("user", "tool")).num_empty == 0, "they are not trained"
    rendering_all = counted(everything)
    assert (rendering_all.lost, rendering_all.num_empty) == ({"weight": 1}, 0)
    of_fields, of_answers = fields.warnings(["assistant"])
    assert "name in 1 of 1, reasoning_content in 2 of 2, tool_calls in 1 of 1, weight in 1 of 1;" in of_fields
    assert of_answers.startswith("1 messages of assistant are trained as empty ones")


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
    assert (fields.lost, fields.num_empty) == ({"content": 1}, 0)


@pytest.mark.parametrize(
    ("answer", "num_empty", "num_null"), [(" ", 1, 0), (None, 1, 1), ([{"type": "text", "text": "x"}], 0, 0)]
)
def test_answers_without_text_are_counted_and_null_as_content_where_it_becomes_text(answer, num_empty, num_null):
    fields = counted(lambda one, _: str(one["content"]), [{"role": "assistant", "content": answer}])
    assert (fields.num_empty, fields.num_null) == (num_empty, num_null)
    assert sum("null as content" in warning for warning in fields.warnings(["assistant"])) == num_null


@pytest.mark.parametrize(("shows", "lost"), [(True, {}), (False, {TOOLS: 1})])
def test_tools_that_are_not_rendered_are_counted(shows, lost):
    fields, plain = Fields(), rendering(content)
    count_fields(fields, FIELDS_CHAT[:1], ["assistant"], lambda messages: plain(messages, "tools" * shows), plain)
    assert (fields.present, fields.lost) == ({TOOLS: 1}, lost)


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
    return [message["content"] for message in with_texts(fields, messages, rendering(body))], fields


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
    assert (contents[0], contents[2]) == ("a bc", "f")
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
