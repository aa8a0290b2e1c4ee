"""`megatron-epp prepare --chat`: conversations in, Megatron's indexed files and a mask of trained tokens out."""

import argparse
import json

import numpy as np
import pytest
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_epp.cli.prepare import add_arguments, run
from megatron_epp.data.chat import ChatEncoder
from megatron_epp.data.chat_fields import Fields
from megatron_epp.mcore.data.document_dataset import DocumentDataset
from megatron_epp.mcore.data.encoders import BYTES, chat_encoder, megatron_encoder
from megatron_epp.mcore.data.inputs import chats
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan.errors import EppError

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
FORGETFUL = "{% for m in messages %}{{ loop.revindex }}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
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
ANSWERS = [["two<|im_end|>", "\u00fc \U0001f600<|im_end|>"], [], ["\n\nyes<|im_end|>"]]
"""Texts of the messages that are trained, by conversation."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a byte-level tokenizer that merges line breaks, with a plain template."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["assistant user system\n\n\n\n\n yes hello again"] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
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


def jsonl(path, *records):
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def template_file(folder, template):
    (folder / "template.jinja").write_text(template)
    return folder / "template.jinja"


def command(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


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
    made = [
        [(tokens.ids.tolist(), tokens.trained.tolist()) for _, tokens in chats([file], chat, None, None, Fields())]
        for file in files
    ]
    with caplog.at_level("INFO", logger="megatron_epp"):
        caplog.clear()
        assert list(chats([files[1]], chat, None, None, Fields()))
    assert made[0] == made[1]
    says = f"{files[1]} has conversations as ShareGPT has them: `from` is read as role, `value` as content"
    assert [record.getMessage() for record in caplog.records] == [says]


def documents(prefix):
    """The tokens and the mask of every document, as they are in the files."""
    data, mask = IndexedDataset(str(prefix)), np.fromfile(f"{prefix}.mask", np.uint8)
    ends = np.cumsum([0, *(len(data[i]) for i in range(len(data)))])
    assert len(mask) == ends[-1]
    return [(data[i].copy(), mask[ends[i] : ends[i + 1]]) for i in range(len(data))]


def trained_texts(prefix, encoder_of_text):
    """The trained text of every document, in runs of tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder_of_text)
    found = []
    for ids, mask in documents(prefix):
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        found.append([tokenizer.decode(ids[start:end]) for start, end in edges])
    return found


def test_the_assistants_answers_are_trained_by_prefixes_of_the_conversation(model, lines, capsys):
    prefix = from_command(model, lines)
    assert trained_texts(prefix, model)[:2] == [[f"{answer}\n" for answer in answers] for answers in ANSWERS[:2]]
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


def test_a_token_that_joins_header_and_answer_is_trained_with_the_answer(model, lines):
    """Line breaks of both are one token."""
    (*_, (found,)) = trained_texts(from_command(model, lines), model)
    assert found.endswith("\n\nyes<|im_end|>\n")
    assert "assistant" not in found


def test_the_tokenizers_own_mask_is_used_where_the_template_marks_answers(model, lines, tmp_path):
    prefix = from_command(model, lines, "--chat-template", template_file(tmp_path, MARKED))
    assert trained_texts(prefix, model)[:2] == ANSWERS[:2]


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


def test_training_reads_what_was_prepared(model, lines):
    prefix = from_command(model, lines)
    dataset = DocumentDataset(str(prefix), context_limit=7)
    masks = [dataset.trained(i, 1, int(dataset.lengths[i]) + 1) for i in range(len(dataset))]
    assert np.concatenate(masks).tolist() == [bit for _, mask in documents(prefix) for bit in mask[1:].tolist()]


def test_texts_that_replace_conversations_remove_their_mask(model, lines, tmp_path):
    prefix = from_command(model, lines)
    prepare([jsonl(tmp_path / "texts.jsonl", {"text": "plain"})], prefix)
    assert not (tmp_path / "corpus.mask").exists()
    assert len(DocumentDataset(str(prefix), 100)) == 1


def test_conversations_that_cannot_be_read_or_are_empty_are_left_out_and_counted(encoder, tmp_path, caplog):
    half = conversation([("user", "half \ud83d pair"), ("assistant", "x")])
    lines = jsonl(tmp_path / "in.jsonl", half, {"messages": []}, conversation(CHATS[0]))
    summary = prepare([lines], tmp_path / "corpus", encoder=encoder, chat=chat_encoder(encoder, ["assistant"]))
    assert (summary.num_unreadable, summary.num_empty, len(summary.lengths)) == (1, 1, 1)
    assert "in.jsonl:1: it is not UTF-8" in caplog.text


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_fields_that_the_template_ignores_are_told_by_name_and_count(encoder, tmp_path, caplog, template):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answers = [{"content": "2", "reasoning_content": "one and one"}, {"content": "", "tool_calls": [call]}]
    messages = [{"role": "user", "content": "1 + 1?"}, *({"role": "assistant"} | answer for answer in answers)]
    lines = jsonl(tmp_path / "in.jsonl", {"messages": messages, "tools": [call]}, *map(conversation, CHATS))
    chat = ChatEncoder(encoder.apply_template, template)
    summary = prepare([lines], tmp_path / "corpus", encoder=encoder, chat=chat)
    first, second = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "have: reasoning_content in 1 of 1, tool_calls in 1 of 1, tools (of lines) in 1 of 1; no token tells" in first
    assert second.startswith("1 messages of assistant are trained as empty ones")
    assert summary.trained.fields.num_empty == 1


@pytest.mark.parametrize(
    ("records", "template", "says"),
    [
        ([CHATS[0]], FORGETFUL, r"in\.jsonl:1: the chat template is not incremental: its tokens of the first 2 of 5 messages"),
        ([CHATS[1], CHATS[2]], "{{ messages[1]['content'] + 1 }}", r"in\.jsonl:1: the chat template cannot be applied to"),
        (
            [CHATS[1], CHATS[2]],
            "{% for",
            r"in\.jsonl:1: the chat template cannot be applied to its 1 messages \(TemplateSyntax",
        ),
        (
            [CHATS[1], [("gpt", "hi")]],
            PLAIN,
            r"no message is of the roles that are trained \(assistant\): .* of gpt, user; name",
        ),
        ([{"text": "x"}], PLAIN, r"in\.jsonl:1 has no list of messages under 'messages'"),
        ([CHATS[0], '{"messages": ['], PLAIN, r"in\.jsonl:2 is not JSON"),
        ([CHATS[0]], " ", r"no documents: all 1 in the input are empty"),
        (
            [CHATS[0], CHATS[2]],
            "{{ messages[0]['content'] }}{% generation %}{% endgeneration %}",
            r"no token of 2 conversations is trained, though there are messages of assistant: check the chat template's "
            r"\{% generation %\} \(--chat-template\), or --train-on",
        ),
    ],
)
def test_bad_conversations_and_templates_are_refused_by_line_and_leave_nothing(encoder, tmp_path, records, template, says):
    made = [conversation(record) if isinstance(record, list) else record for record in records]
    lines = jsonl(tmp_path / "in.jsonl", *made)
    if template == " ":
        template = "{{ '' }}"
    with pytest.raises(EppError, match=says) as caught:
        prepare([lines], tmp_path / "corpus", encoder=encoder, chat=ChatEncoder(encoder.apply_template, template))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_tokenizers_without_a_template_are_refused(model, encoder, tmp_path):
    with pytest.raises(
        EppError, match="--chat needs a tokenizer with a chat template: pass --tokenizer-type HuggingFaceTokenizer"
    ):
        chat_encoder(BYTES, ["assistant"])
    bare = argparse.Namespace(apply_template=encoder.apply_template, template=None, tokenizer=encoder.tokenizer)
    with pytest.raises(EppError, match=r"has no chat template, as is usual .* pass .* --chat-template FILE"):
        chat_encoder(bare, ["assistant"])
    with pytest.raises(EppError, match=r"cannot read .*nothing\.jinja: No such file"):
        chat_encoder(encoder, ["assistant"], tmp_path / "nothing.jinja")
    named = argparse.Namespace(apply_template=encoder.apply_template, template={"default": PLAIN, "tool_use": "x"})
    assert chat_encoder(named, ["assistant"]).template == PLAIN


@pytest.mark.parametrize("flags", [("--train-on", "user"), ("--chat-template", "file")])
def test_flags_of_conversations_need_conversations(lines, tmp_path, flags):
    with pytest.raises(EppError, match=f"{flags[0]} is for conversations: add --chat"):
        command("--input", lines, "--output-prefix", tmp_path / "corpus", *flags)
