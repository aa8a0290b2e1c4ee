"""`megatron-epp prepare --chat`: conversations in, Megatron's indexed files and a mask of trained tokens out."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet
import pytest
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_epp.data.chat import ChatCounts, ChatEncoder
from megatron_epp.mcore.data.encoders import BYTES, chat_encoder, megatron_encoder
from megatron_epp.mcore.data.inputs import chats
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan.errors import EppError
from tests.mcore.test_prepare import command, jsonl

FILES = ["corpus.bin", "corpus.idx", "corpus.mask", "corpus.tokenizer.json"]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% set at = namespace(question=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set at.question = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > "
    "at.question %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The thoughts of answers are rendered behind the last question alone, and empty ones too."""
CHATS = [
    [
        ("system", "be brief"),
        ("user", "1 + 1?"),
        ("assistant", "two"),
        ("user", "f\u00fcr alle?"),
        ("assistant", "\u00fc \U0001f600"),
    ],
    [("user", "hello")],
    [("user", "again"), ("assistant", "\n\nyes")],
]
ANSWERS = [["two<|im_end|>", "\u00fc \U0001f600<|im_end|>"], []]
"""Texts of the messages that are trained, of the first two conversations."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a byte-level tokenizer that merges line breaks, with a plain template."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=304,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["assistant user system\n\n\n\n\n yes hello again"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    fast.chat_template = PLAIN
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(model):
    return megatron_encoder({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(model)}, "flags")


@pytest.fixture
def lines(tmp_path):
    return jsonl(tmp_path / "in.jsonl", *(conversation(chat) for chat in CHATS))


def conversation(chat, key="messages"):
    return {key: [{"role": role, "content": content} for role, content in chat]}


def template_file(folder, template):
    (folder / "template.jinja").write_text(template)
    return folder / "template.jinja"


def from_command(model, lines, *flags):
    prefix = lines.parent / "corpus"
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model)
    assert command("--input", lines, "--output-prefix", prefix, "--chat", *tokenizer, *flags) == 0
    return prefix


def test_conversations_as_sharegpt_has_them_are_read_and_a_line_says_so(encoder, tmp_path, caplog):
    names = {"assistant": "gpt", "user": "human"}
    theirs = [{"conversations": [{"from": names.get(role, role), "value": text} for role, text in chat]} for chat in CHATS]
    chat = ChatEncoder(encoder.apply_template, PLAIN)
    files = jsonl(tmp_path / "ours.jsonl", *map(conversation, CHATS)), jsonl(tmp_path / "theirs.jsonl", *theirs)
    with caplog.at_level("INFO", logger="megatron_epp"):
        assert encoded(files[0], chat) == encoded(files[1], chat)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{files[1]} has conversations as ShareGPT has them: `from` is read as role, `value` as content")


def encoded(file, chat):
    return [(tokens.ids.tolist(), tokens.trained.tolist()) for _, tokens in chats([file], chat, None, ChatCounts())]


def documents(prefix):
    data, mask = IndexedDataset(str(prefix)), np.fromfile(f"{prefix}.mask", np.uint8)
    ends = np.cumsum([0, *(len(data[i]) for i in range(len(data)))])
    assert len(mask) == ends[-1]
    return [(data[i].copy(), mask[ends[i] : ends[i + 1]]) for i in range(len(data))]


def trained_texts(prefix, encoder_of_text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_of_text)
    found = []
    for ids, mask in documents(prefix):
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        found.append([tokenizer.decode(ids[start:end]) for start, end in edges])
    return found


def test_the_assistants_answers_are_trained_by_prefixes_of_the_conversation(model, lines, capsys):
    prefix = from_command(model, lines)
    *own, (joined,) = trained_texts(prefix, model)
    assert own == ANSWERS
    assert joined.endswith("\n\nyes<|im_end|>")  # line breaks of header and answer are one token
    assert "assistant" not in joined
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    for (ids, _), chat in zip(documents(prefix), CHATS, strict=True):
        messages = conversation(chat)["messages"]
        assert ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    printed = capsys.readouterr().out
    num_tokens = sum(len(ids) for ids, _ in documents(prefix))
    num_trained = sum(int(mask.sum()) for _, mask in documents(prefix))
    share = f"{num_trained:,} tokens ({num_trained / num_tokens:.1%}) are trained, messages of assistant"
    assert f"corpus.mask: {share}; conversations without any: 1 (they take time and train nothing)" in printed
    assert f"--data-path {prefix} --tokenizer-type HuggingFaceTokenizer" in printed
    assert sorted(path.name for path in lines.parent.iterdir()) == [*FILES, "in.jsonl"]


def test_the_tokenizers_own_mask_is_used_where_the_template_marks_answers(model, lines, tmp_path):
    prefix = from_command(model, lines, "--chat-template", template_file(tmp_path, MARKED))
    assert trained_texts(prefix, model)[:2] == ANSWERS


def test_other_roles_and_another_key(model, tmp_path):
    lines = jsonl(tmp_path / "in.json", *(conversation(chat, "turns") for chat in CHATS))
    prefix = from_command(model, lines, "--json-key", "turns", "--train-on", "system", "user")
    assert trained_texts(prefix, model)[1] == ["<|im_start|>user\nhello<|im_end|>\n"]
    assert [len(runs) for runs in trained_texts(prefix, model)] == [2, 1, 1]


def test_an_end_of_document_is_added_where_asked_for_and_trained_behind_an_answer(model, lines, encoder):
    prefix = from_command(model, lines)
    bare = documents(prefix)
    prefix = from_command(model, lines, "--append-eod", "--overwrite")
    for number, (ids, mask) in enumerate(documents(prefix)):
        assert ids.tolist() == [*bare[number][0], encoder.tokenizer.eod]
        assert mask.tolist() == [*bare[number][1], number != 1]


def test_conversations_that_cannot_be_read_or_are_empty_are_left_out_and_counted(encoder, tmp_path, caplog):
    half = conversation([("user", "half \ud83d pair"), ("assistant", "x")])
    lines = jsonl(tmp_path / "in.jsonl", half, {"messages": []}, conversation(CHATS[0]))
    summary = prepare([lines], tmp_path / "corpus", encoder=encoder, chat=chat_encoder(encoder, ["assistant"]))
    assert (summary.num_unreadable, summary.num_empty, len(summary.lengths)) == (1, 1, 1)
    assert "in.jsonl:1: it is not UTF-8" in caplog.text


TWO = [("user", "ab?"), ("assistant", "cd"), ("user", "ef?"), ("assistant", "gh")]
PARTS = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TWO[:2]]


def prepared(encoder, folder, template, *records, **settings):
    chat = dataclasses.replace(chat_encoder(encoder, ["assistant"]), template=template, **settings)
    return prepare([jsonl(folder / "in.jsonl", *records)], folder / "corpus", encoder=encoder, chat=chat)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_parts_of_a_content_are_text(encoder, model, tmp_path, caplog):
    prepared(encoder, tmp_path, PLAIN, {"messages": PARTS})
    assert trained_texts(tmp_path / "corpus", model) == [["cd<|im_end|>"]]
    assert warnings_of(caplog)[0].startswith("2 messages have a list of parts as content")


REASONED = [
    {"role": role, "content": content} | ({"reasoning_content": thought} if thought else {})
    for role, content, thought in [
        ("user", "ab?", ""),
        ("assistant", "cd", "x"),
        ("user", "ef?", ""),
        ("assistant", "gh", "yz"),
    ]
]


def test_answers_that_lose_their_thought_as_history_are_samples_of_their_own(encoder, model, tmp_path, caplog):
    summary = prepared(encoder, tmp_path, THINKING, {"messages": REASONED}, conversation(TWO[:2]))
    assert trained_texts(tmp_path / "corpus", model) == [
        ["<think>\nx\n</think>\n\ncd<|im_end|>"],
        ["<think>\nyz\n</think>\n\ngh<|im_end|>"],
        ["<think>\n\n</think>\n\ncd<|im_end|>"],
    ]
    repeated, total = int(summary.lengths[0]), int(summary.lengths.sum())
    (line,) = (line for line in str(summary).splitlines() if line.startswith("1 conversations are 2 samples"))
    assert f"{repeated} tokens ({repeated / total:.1%}) more than in one sample; --chat-turns last" in line
    assert not warnings_of(caplog)


def test_the_last_answer_alone_is_trained_where_asked_for(model, tmp_path, capsys):
    lines, template = jsonl(tmp_path / "in.jsonl", {"messages": REASONED}), template_file(tmp_path, THINKING)
    prefix = from_command(model, lines, "--chat-template", template, "--chat-turns", "last")
    assert trained_texts(prefix, model) == [["<think>\nyz\n</think>\n\ngh<|im_end|>"]]
    assert "samples, since" not in capsys.readouterr().out


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_variables_of_a_line_reach_the_template(encoder, model, tmp_path, caplog, given):
    """As that by which the prompt has an empty thought, which the model does not write then."""
    prepared(encoder, tmp_path, THINKING, conversation(TWO[:2]) | {"chat_template_kwargs": given})
    assert trained_texts(tmp_path / "corpus", model) == [["cd<|im_end|>"]]
    assert not warnings_of(caplog)
    prepared(encoder, tmp_path, PLAIN, conversation(TWO[:2]) | {"chat_template_kwargs": given})
    assert "enable_thinking (of chat_template_kwargs) in 1 of 1; no token tells what they say" in warnings_of(caplog)[0]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
LISTING = "{% if tools %}{{ tools | length }}{{ tools[0].function.name }}\n{% endif %}" + PLAIN


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_of_a_line_may_be_text_as_tables_store_them(encoder, model, tmp_path, caplog, tools):
    prepared(encoder, tmp_path, LISTING, conversation(TWO[:2]) | {"tools": tools})
    ((ids, _),) = documents(tmp_path / "corpus")
    assert transformers.AutoTokenizer.from_pretrained(model).decode(ids).startswith("1add\n<|im_start|>user")
    assert not warnings_of(caplog)


@pytest.mark.parametrize("empty", ["", "null", "[]", None, []])
def test_a_line_without_tools_has_none(encoder, model, tmp_path, caplog, empty):
    prepared(encoder, tmp_path, LISTING, conversation(TWO[:2]) | {"tools": empty, "chat_template_kwargs": None})
    assert trained_texts(tmp_path / "corpus", model) == [["cd<|im_end|>"]]
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": "add"}, "in.jsonl:1: tools is not JSON"),
        ({"tools": str([TOOL])}, "in.jsonl:1: tools is not JSON: .*; it is as Python prints it: write it with json.dumps"),
        ({"tools": [str(TOOL)]}, "in.jsonl:1: tool 1 is not JSON: .*; it is as Python prints it: write it with json.dumps"),
        ({"tools": {"name": "add"}}, "in.jsonl:1: tools is {'name': 'add'}, which is not a list"),
        ({"tools": ["add"]}, "in.jsonl:1: tool 1 is not JSON"),
        ({"chat_template_kwargs": [1]}, r"in.jsonl:1: chat_template_kwargs is \[1\], which is not an object"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs has tokenize, which is no variable"),
    ],
)
def test_what_a_line_gives_to_the_template_is_refused_by_kind(encoder, tmp_path, fields, says):
    with pytest.raises(EppError, match=says):
        prepared(encoder, tmp_path, PLAIN, conversation(TWO[:2]) | fields)


def test_one_sample_is_printed_with_what_is_trained_marked(model, lines, capsys):
    from_command(model, lines)
    printed = capsys.readouterr().out.splitlines()
    (first,) = (number for number, line in enumerate(printed) if line.startswith(f"first sample, from {lines}:1: "))
    assert printed[first].endswith("tokens, what is marked is trained (\\n is a line break)")
    assert [line.rstrip() for line in printed[first + 1 : first + 13]] == [
        "          | <|im_start|>system\\n",
        "          | be brief<|im_end|>\\n",
        "          | <|im_start|>user\\n",
        "          | 1 + 1?<|im_end|>\\n",
        "          | <|im_start|>assistant\\n",
        "  trained | two<|im_end|>",
        "          | \\n",
        "          | <|im_start|>user\\n",
        "          | f\u00fcr alle?<|im_end|>\\n",
        "          | <|im_start|>assistant\\n",
        "  trained | \u00fc \U0001f600<|im_end|>",
        "          | \\n",
    ]


@pytest.mark.parametrize("as_text", [False, True])
def test_conversations_of_parquet_are_those_of_jsonl(encoder, model, tmp_path, as_text):
    """A table has all fields in all rows, null where a message has none; columns of JSON are usual, too."""
    chat = ChatEncoder(encoder.apply_template, THINKING)
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [{"messages": REASONED, "tools": [tool]}, {"messages": REASONED[:2], "tools": None}]
    tabled = [{key: json.dumps(value) for key, value in row.items()} for row in rows] if as_text else rows
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tabled), tmp_path / "in.parquet")
    expected = encoded(jsonl(tmp_path / "in.jsonl", *rows), chat)
    assert encoded(tmp_path / "in.parquet", chat) == expected
    assert len(expected) == 3


@pytest.mark.parametrize(
    ("records", "template", "says"),
    [
        (CHATS[1:], "{% for", r"in\.jsonl:1: the chat template cannot be applied to its 1 messages \(TemplateSyntax"),
        ([CHATS[1], [("gpt", "hi")]], PLAIN, r"no message is of the roles that are trained \(assistant\): .* of gpt, user"),
        ([[("a\0b", "hi")]], PLAIN, r"the messages are of 'a\\x00b'; name"),
        (CHATS[:1], "{{ '' }}", "no documents: all 1 in the input are empty"),
        (
            CHATS[::2],
            "{{ messages[0]['content'] }}{% generation %}{% endgeneration %}",
            r"no token of 2 conversations is trained, .*: check .* \{% generation %\} \(--chat-template\), or --train-on",
        ),
    ],
)
def test_bad_conversations_and_templates_are_refused_by_line_and_leave_nothing(encoder, tmp_path, records, template, says):
    lines = jsonl(tmp_path / "in.jsonl", *map(conversation, records))
    with pytest.raises(EppError, match=says) as caught:
        prepare([lines], tmp_path / "corpus", encoder=encoder, chat=ChatEncoder(encoder.apply_template, template))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_tokenizers_without_a_template_are_refused(model, encoder, tmp_path):
    with pytest.raises(EppError, match="--chat needs a tokenizer with a chat template: pass --tokenizer-type Hugging"):
        chat_encoder(BYTES, ["assistant"])
    bare = dataclasses.replace(encoder, template=None)
    with pytest.raises(EppError, match=r"has no chat template, as is usual .* pass .* --chat-template FILE"):
        chat_encoder(bare, ["assistant"])
    with pytest.raises(EppError, match=r"cannot read .*nothing\.jinja: No such file"):
        chat_encoder(encoder, ["assistant"], tmp_path / "nothing.jinja")
    named = dataclasses.replace(encoder, template={"default": PLAIN, "tool_use": "x"})
    assert chat_encoder(named, ["assistant"]).template == PLAIN


@pytest.mark.parametrize("flags", [("--train-on", "user"), ("--chat-template", "file"), ("--chat-turns", "last")])
def test_flags_of_conversations_need_conversations(lines, tmp_path, flags):
    with pytest.raises(EppError, match=f"{flags[0]} is for conversations: add --chat"):
        command("--input", lines, "--output-prefix", tmp_path / "corpus", *flags)
