"""`megatron-epp prepare`: text in, Megatron's indexed files out."""

import argparse
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron_epp.data.token_record import Tokenizer, load_record
from megatron_epp.mcore.data import encoders
from megatron_epp.mcore.data import prepare as prepare_module
from megatron_epp.mcore.data.document_dataset import DocumentFile, check_tokens
from megatron_epp.mcore.data.documents import identity_of_run
from megatron_epp.mcore.data.encoders import BYTES, Encoder, megatron_encoder
from megatron_epp.mcore.data.prepare import histogram, prepare
from megatron_epp.plan.errors import EppError
from megatron_epp.tools.cli.prepare import add_arguments, run
from tests.support.failing_disk import swept

PAIR = ["corpus.bin", "corpus.idx", "corpus.tokenizer.json"]
# In sorted order of path: with what must not matter (hidden, nested, spaces) and what must survive (any byte, CRLF, no newline)
FILES = {
    ".hidden.txt": b"dot", "B.txt": "f\u00fcr alle \U0001f600\n".encode(), "a.txt": bytes(range(256)),
    "deep/er/c.txt": b"x\r\ny", "deep/spaced name.txt": b"z" * 70_000,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "input"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "skip.bin").write_bytes(b"another suffix")
    return root


def documents(prefix):
    data = IndexedDataset(str(prefix))
    return [data[i].tolist() for i in range(len(data))]


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def jsonl(path, *records):
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def command(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(argument) for argument in arguments]))


# What comes out is what went in


def test_a_folder_becomes_one_document_per_file_that_is_not_empty_in_sorted_order_byte_for_byte(folder, tmp_path):
    (folder / "empty.txt").touch()
    summary = prepare([folder], tmp_path / "out" / "corpus")
    assert documents(tmp_path / "out" / "corpus") == [[*content, 256] for content in FILES.values()]
    assert summary.lengths.tolist() == [len(content) + 1 for content in FILES.values()]
    assert summary.num_empty == 1
    assert names(tmp_path / "out") == PAIR


def test_jsonl_becomes_one_document_per_line_byte_for_byte(tmp_path):
    texts = ["hello", "gr\u00fc\u00dfe \U0001f600\n\ttab", "\x00\x7f", "half \ud83d pair"]
    lines = jsonl(tmp_path / "in.jsonl", {"body": texts[0], "id": 1}, "", *({"body": text} for text in texts[1:]))
    prepare([lines], tmp_path / "corpus", json_key="body")
    assert documents(tmp_path / "corpus") == [[*text.encode("utf-8", "surrogatepass"), 256] for text in texts]


def test_what_a_folder_has_besides_is_told(folder, tmp_path, caplog):
    (folder / "more.txt.gz").write_bytes(gzip.compress(b"plain"))
    for suffix in (".gz", ".txt.gz"):
        assert prepare([folder], tmp_path / "corpus", suffixes=[suffix]).lengths.tolist() == [len("plain") + 1]
    for name in ("a.parquet", "b.parquet", "LICENSE"):
        (folder / name).touch()
    with caplog.at_level("INFO", logger="megatron_epp"):
        prepare([folder], tmp_path / "corpus")
    assert bytes(documents(tmp_path / "corpus")[-1][:-1]) == b"plain"
    says = f"{folder}: 6 files taken, and others left out (2 of .parquet, 1 of no suffix, 1 of .bin); see --suffixes"
    assert says in (record.getMessage() for record in caplog.records)


def test_bytes_that_are_no_text_are_told_and_binary_files_of_a_known_kind_are_refused(folder, tmp_path, caplog):
    prepare([folder], tmp_path / "corpus")
    says = f"1 documents are no text in UTF-8, and all their bytes are tokens: {folder / 'a.txt'}"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [says]
    (folder / "a.txt").write_bytes(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n")
    with pytest.raises(EppError, match=r"a\.txt is a PDF, not text in UTF-8: extract its text first"):
        prepare([folder], tmp_path / "corpus")


def test_inputs_are_taken_in_the_order_given_and_may_be_single_files(folder, tmp_path):
    lines = jsonl(tmp_path / "in.jsonl", {"text": "from jsonl"})
    prepare([lines, folder / "skip.bin", folder / "deep"], tmp_path / "corpus", append_eod=False)
    assert [bytes(tokens) for tokens in documents(tmp_path / "corpus")] == [
        b"from jsonl",
        b"another suffix",
        FILES["deep/er/c.txt"],
        FILES["deep/spaced name.txt"],
    ]


# Tokenizers


def test_megatron_trains_on_bytes_with_the_flags_that_are_printed(folder, tmp_path, capsys):
    assert command("--input", folder, "--output-prefix", tmp_path / "corpus") == 0
    printed = capsys.readouterr().out
    assert "5 documents, 70,283 tokens of NullTokenizer bytes (vocabulary of 257) (left out: 0 empty, 0 not UTF-8)" in printed
    assert f"--data-path {tmp_path / 'corpus'} --tokenizer-type NullTokenizer --vocab-size 257" in printed
    tokenizer = build_tokenizer(argparse.Namespace(tokenizer_type="NullTokenizer", vocab_size=257, pad_vocab_size=False))
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_any_tokenizer_of_megatrons_can_be_used(tmp_path):
    lines = jsonl(tmp_path / "in.jsonl", {"text": "7 8 9"}, {"text": "70000"})
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "70001")
    command("--input", lines, "--output-prefix", tmp_path / "corpus", *flags)
    assert documents(tmp_path / "corpus") == [[7, 8, 9, 70000], [70000, 70000]]
    again = ("--input", lines, "--output-prefix", tmp_path / "corpus", "--no-append-eod", *flags)
    with pytest.raises(EppError, match=r"corpus\.bin exists already: add --overwrite to replace it, or give another --output"):
        command(*again)
    assert documents(tmp_path / "corpus") == [[7, 8, 9, 70000], [70000, 70000]]
    command(*again, "--overwrite")
    assert documents(tmp_path / "corpus") == [[7, 8, 9], [70000]]


def sentencepiece_model(folder, text):
    folder.mkdir()
    (folder / "text").write_text(text * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "text"), vocab_size=40, hard_vocab_limit=False, minloglevel=2
    )
    return str(folder / "text.model")


@pytest.fixture(scope="module")
def cats(tmp_path_factory):
    return sentencepiece_model(tmp_path_factory.mktemp("cats") / "model", "the cat sat on the mat and the dog sat on the log\n")


SENTENCES = ("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model")


def test_a_pair_that_is_given_for_text_is_recognized(tmp_path):
    prefix = tmp_path / "pair"
    prepare([jsonl(tmp_path / "in.jsonl", {"text": "a" * 300})], prefix)
    for suffix in (".idx", ".bin"):
        raw = Path(f"{prefix}{suffix}").read_bytes()
        (tmp_path / f"pair{suffix}").write_bytes(raw + b"\0")
        with pytest.raises(EppError, match=rf"pair\{suffix} is one of a pair .*: train with --data-path .*pair$"):
            prepare([tmp_path / f"pair{suffix}"], tmp_path / "corpus")


@pytest.mark.parametrize("model", ["/no/where", "{folder}/tokeniser"])
def test_a_tokenizer_folder_that_is_not_there_is_named_before_anything_is_looked_for(tmp_path, monkeypatch, model):
    (tmp_path / "tokenizer").mkdir()
    monkeypatch.setattr(encoders.releases, "tokenizer_settings", lambda options: pytest.fail("it was looked for"))
    name = model.format(folder=tmp_path)
    with pytest.raises(EppError, match=f"--tokenizer-model: there is no folder {name}") as error:
        encoders.megatron_encoder({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": name}, "")
    assert ("did you mean 'tokenizer'?" in str(error.value)) is ("tokeniser" in name)


def test_a_name_that_a_hub_may_have_is_looked_for_there_and_both_are_told(monkeypatch, caplog):
    def refuse(config):
        raise OSError("no network")

    monkeypatch.setattr("megatron.core.tokenizers.utils.build_tokenizer.build_tokenizer", refuse)
    says = "there is no folder some/model here, so the tokenizer is that of Hugging Face's hub"
    with pytest.raises(EppError, match=f"{says}, which does not give it: no network"):
        encoders.megatron_encoder({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "some/model"}, "")
    assert f"{says}: it is downloaded unless it has been before" in caplog.text


# Training knows the tokens


@pytest.fixture(scope="module")
def prepared(cats, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    lines = jsonl(folder / "in.jsonl", *({"text": "the cat sat on the mat"} for _ in range(30)))
    command("--input", lines, "--output-prefix", folder / "bytes")
    command("--input", lines, "--output-prefix", folder / "cats", *SENTENCES, cats)
    return folder


def opened(prefix, kind="NullTokenizer", model=None, vocab_size=257, **given):
    """Return the messages of a training run about a file at its start."""
    tokenizer = argparse.Namespace(
        tokenizer_type=kind,
        tokenizer_model=model,
        vocab_size=vocab_size,
        pad_vocab_size=False,
        chat_template=None,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        metadata_path=None,
    )
    check_tokens(DocumentFile(str(prefix)), identity_of_run(tokenizer), **given)


def test_the_tokenizer_that_was_used_is_recorded_beside_the_pair(prepared, cats):
    record = load_record(str(prepared / "cats"))
    made = record.tokenizer
    assert (made.kind, made.model) == ("GPTSentencePieceTokenizer", cats)
    assert made.digest is not None
    data, processor = documents(prepared / "cats"), sentencepiece.SentencePieceProcessor(model_file=cats)
    assert (record.num_documents, record.num_tokens) == (30, sum(map(len, data)))
    assert record.max_token == max(map(max, data)) < made.vocab_size
    assert made.eod == processor.eos_id()
    assert data == [[*processor.encode("the cat sat on the mat"), made.eod]] * 30
    assert load_record(str(prepared / "bytes")).tokenizer == BYTES.tokenizer


def test_training_takes_the_tokenizer_that_was_used_from_wherever_it_is(prepared, cats, tmp_path):
    for model in (cats, str(shutil.copy(cats, tmp_path / "copy.model"))):
        opened(prepared / "cats", "GPTSentencePieceTokenizer", model, masks_eod=True)
    opened(prepared / "bytes", masks_eod=True)


def test_training_refuses_another_tokenizer_by_name(prepared, cats, tmp_path):
    birds = sentencepiece_model(tmp_path / "birds", "a bird in the hand is worth two in the bush, they say\n")
    with pytest.raises(EppError, match=rf"tokens of GPTSentencePieceTokenizer {cats} .* tokenizer is .* {birds} "):
        opened(prepared / "cats", "GPTSentencePieceTokenizer", birds)
    with pytest.raises(EppError, match=rf"train with {' '.join(SENTENCES)} {cats}, or prepa"):
        opened(prepared / "cats")


@pytest.fixture
def without_record(prepared, tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared / f"bytes{suffix}", tmp_path / f"corpus{suffix}")
    return tmp_path / "corpus"


def test_tokens_without_a_record_are_taken_with_a_line_and_looked_into(without_record, caplog):
    with caplog.at_level("INFO", logger="megatron_epp"):
        opened(without_record)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("megatron_epp")]
    assert "corpus has no record of its tokenizer (.tokenizer.json, " in line
    with pytest.raises(EppError, match="corpus has token 256, and this run's tokenizer has a vocabulary of 256"):
        opened(without_record, vocab_size=256)


def test_a_record_of_another_pair_is_not_gone_by(prepared, without_record, caplog):
    shutil.copy(prepared / "cats.tokenizer.json", f"{without_record}.tokenizer.json")
    opened(without_record)
    assert re.search(r"corpus.tokenizer.json is of 30 documents with \d+ tokens, and the pair has 30 with 690", caplog.text)


def test_a_hugging_face_tokenizer_is_known_with_and_without_what_it_puts_around_texts(tmp_path):
    words = {"<s>": 0, "</s>": 1, "[UNK]": 2, "the": 3, "cat": 4}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "model")
    options = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "model")}
    around, bare = (
        megatron_encoder(options | {"tokenizer_hf_no_include_special_tokens": without}, "flags") for without in (False, True)
    )
    assert around.encode(b"the cat").tolist() == [0, 3, 4]
    assert bare.encode(b"the cat").tolist() == [3, 4]
    assert around.tokenizer.digest == bare.tokenizer.digest is not None


# What cannot be read


def test_documents_that_a_tokenizer_cannot_read_are_left_out_and_counted(tmp_path, caplog):
    (tmp_path / "latin.txt").write_bytes(b"\xfcber")
    (tmp_path / "good.txt").write_text("1 2")
    encoder = megatron_encoder({"tokenizer_type": "NullTokenizer", "vocab_size": 10}, "flags")
    summary = prepare([tmp_path], tmp_path / "corpus", encoder=encoder)
    assert (summary.num_unreadable, documents(tmp_path / "corpus")) == (1, [[1, 2, 9]])
    assert "latin.txt: it is not UTF-8" in caplog.text


# Failure leaves nothing behind

NO_EOD = Encoder(BYTES.encode, Tokenizer("NullTokenizer", None, 256, None, None), "")
BEYOND = Encoder(lambda raw: np.array([300]), BYTES.tokenizer, "")


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        ([{"text": "ok"}, '{"text": "cut'], {}, r"in\.jsonl:2 is not JSON: "),
        ([{"text": "ok"}, "[" * 200_000 + "]" * 200_000], {}, r"in\.jsonl:2 has lists or objects nested deeper than 100"),
        ([{"text": "ok"}, {"txt": "ok"}], {}, r"in\.jsonl:2 has no text under 'text' \(it has 'txt'\); .* --json-key"),
        ([{"text": "ok"}, '["text"]'], {}, r"in\.jsonl:2 has no text under 'text'"),
        (["[", "{}]"], {}, r"in\.jsonl:1 begins a list in JSON, not JSONL, .*: jq -c '\.\[\]'"),
        (["{\0}"], {}, r"in\.jsonl:1 is not JSONL: it has bytes that no text in UTF-8 has"),
        ([{"text": 5}], {}, r"in\.jsonl:1 has no text under 'text'"),
        ([{"text": ""}, {"text": ""}], {}, "no documents: all 2 in the input are empty or not UTF-8"),
        ([], {}, "no documents: all 0 in the input are empty"),
        ([{"text": "ok"}], {"encoder": NO_EOD}, "no end-of-document token; pass --no-append-eod"),
        ([{"text": "\xff"}], {"encoder": BEYOND}, "token 300, outside .* of 257"),
    ],
)
def test_bad_input_is_refused_and_earlier_files_stay_as_they_were(tmp_path, lines, options, says):
    prepare([jsonl(tmp_path / "before.jsonl", {"text": "earlier"})], tmp_path / "corpus")
    before = names(tmp_path)
    with pytest.raises(EppError, match=says) as caught:
        prepare([jsonl(tmp_path / "in.jsonl", *lines)], tmp_path / "corpus", **options)
    assert str(caught.value).count("\n") <= 1
    assert names(tmp_path) == sorted([*before, "in.jsonl"])
    assert [bytes(tokens[:-1]) for tokens in documents(tmp_path / "corpus")] == [b"earlier"]


def test_input_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EppError, match=r"--input .*nowhere does not exist"):
        prepare([tmp_path / "nowhere"], tmp_path / "out" / "corpus")
    with pytest.raises(EppError, match=r"no documents: no file ending in \.tex under .*empty; see --suffixes"):
        prepare([tmp_path / "empty"], tmp_path / "out" / "corpus", suffixes=[".tex"])
    assert names(tmp_path) == ["empty"]


def test_an_output_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=r"/file: (File exists|Not a directory)"):
        prepare([folder], tmp_path / "file" / "corpus")


@pytest.mark.parametrize("before", ["nothing", "a pair", "a pair with a mask"])
def test_whichever_step_of_the_disk_fails_the_files_are_the_old_ones_or_the_new_ones(tmp_path, folder, before):
    prefix, text, refused = tmp_path / "corpus", jsonl(tmp_path / "one.jsonl", {"text": "new text"}), 0
    if before != "nothing":
        prepare([folder], prefix)
    if before == "a pair with a mask":
        (tmp_path / "corpus.mask").write_bytes(b"\1")
    old = {path.name: path.read_bytes() for path in tmp_path.glob("corpus*")}
    for answer in swept(lambda: prepare([text], prefix)):
        if isinstance(answer, EppError):
            refused += 1
            assert "corpus" in str(answer)
            assert str(answer).endswith("No space left on device")
            assert {path.name: path.read_bytes() for path in tmp_path.glob("corpus*")} == old
        else:
            assert names(tmp_path) == [*PAIR, "input", "one.jsonl"]
            assert len(documents(prefix)) == 1
            for name in PAIR:
                (tmp_path / name).unlink()
            for name, content in old.items():
                (tmp_path / name).write_bytes(content)
    assert refused >= 12


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError("tokenizer failed")])
def test_an_interrupted_run_leaves_nothing_behind(folder, tmp_path, interruption):
    calls = []

    def encode(raw):
        calls.append(raw)
        if len(calls) == 3:
            assert [name for name in names(tmp_path) if name.startswith("corpus.partial")]
            raise interruption
        return np.frombuffer(raw, np.uint8)

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        prepare([folder], tmp_path / "corpus", encoder=Encoder(encode, BYTES.tokenizer, ""))
    assert names(tmp_path) == ["input"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokenizer-model", "m"], "--tokenizer-model needs --tokenizer-type"),
        (["--tokenizer-type", "Unheard"], "Megatron cannot build the tokenizer --tokenizer-type Unheard: "),
        (["--tokenizer-type", "GPTSentencePieceTokenizer"], "Megatron cannot build the tokenizer"),
    ],
)
def test_tokenizers_that_cannot_be_built_are_refused(folder, tmp_path, flags, says):
    with pytest.raises(EppError, match=says):
        command("--input", folder, "--output-prefix", tmp_path / "corpus", *flags)
    assert names(tmp_path) == ["input"]


# The summary


def test_long_work_reports_progress(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prepare_module, "_LOG_EVERY_SECONDS", 0.0)
    with caplog.at_level("INFO", logger="megatron_epp"):
        prepare([folder], tmp_path / "corpus")
    assert "prepared 5 documents, 70,283 tokens; now at" in caplog.text


def test_histogram_count_saved_tensors_and_tokens_in_fourfold_bins():
    lines = histogram(np.array([1, 3, 4, 15, 16, 100, 1000]))
    counts = [line.split()[3] for line in lines[1:]]
    assert [line.split()[:3] for line in lines[1:3]] == [["1", "-", "3"], ["4", "-", "15"]]
    assert counts == ["2", "2", "1", "1", "1"]
    assert lines[-1].split()[4] == "87.8%"
