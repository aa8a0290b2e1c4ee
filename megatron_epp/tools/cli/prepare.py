"""The command that writes documents as Megatron's ``.bin``/``.idx`` pairs."""

from __future__ import annotations

import argparse
import logging
import shlex
import warnings
from argparse import ArgumentParser, Namespace
from typing import Any

from megatron_epp.data.chat import ASSISTANT, TURNS
from megatron_epp.data.indexed_documents import MASK_SUFFIX
from megatron_epp.data.records import RECORD_SUFFIXES
from megatron_epp.data.token_record import SUFFIX
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.data.encoders import BYTES, Encoder, chat_encoder, megatron_encoder
from megatron_epp.mcore.data.inputs import SUFFIXES
from megatron_epp.mcore.data.prepare import prepare, refuse_existing
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of, flag_words
from megatron_epp.tools.cli.terminal import Parser, progress, say

# Flags by name and, where it differs, the field of Megatron's TokenizerConfig that each sets.
_TOKENIZER_FLAGS: dict[str, dict[str, Any]] = {
    "tokenizer_type": {"metavar": "NAME", "help": "HuggingFaceTokenizer, SentencePieceTokenizer, ... (default: bytes)"},
    "tokenizer_model": {"metavar": "NAME|FILE", "help": "name of a Hugging Face model, or file or folder of the tokenizer"},
    "vocab_file": {"metavar": "FILE", "help": "vocabulary of GPT2BPETokenizer and its kin"},
    "merge_file": {"metavar": "FILE", "help": "merges of GPT2BPETokenizer and its kin"},
    "vocab_size": {"metavar": "N", "type": COUNT}
    | {"help": "vocabulary size of NullTokenizer, whose text is ids, and TikTokenizer"},
    "tiktoken_pattern": {"metavar": "NAME", "help": "pattern of TikTokenizer"},
    "tokenizer_special_tokens": {"metavar": "TOKEN", "nargs": "+", "dest": "special_tokens"}
    | {"help": "special tokens to add to the tokenizer"},
    "tokenizer_hf_no_include_special_tokens": {"action": "store_true"}
    | {"help": "leave out what a Hugging Face tokenizer puts around every text"},
    "trust_remote_code": {"action": "store_true", "help": "run code that comes with a Hugging Face tokenizer"},
}


def add_tokenizer_arguments(parser: ArgumentParser) -> None:
    """Megatron's tokenizer flags, as far as they concern how text becomes ids."""
    group = parser.add_argument_group(
        "tokenizer",
        "the tokenizer of the model to train, by the flags of its training; without any, tokens are bytes (0-255, and 256 ends "
        "a document), for models of bytes",
    )
    for name, settings in _TOKENIZER_FLAGS.items():
        unsaid = "" if "default" in settings["help"] else " (default: none)"
        group.add_argument(flag_of(name), default=None, **settings | {"help": settings["help"] + unsaid})


def encoder_from(args: Namespace) -> Encoder:
    """Return the encoder that the flags of `add_tokenizer_arguments` name; byte-level if none is given."""
    fields = {name: settings.get("dest", name) for name, settings in _TOKENIZER_FLAGS.items()}
    named = {name: value for name, field in fields.items() if (value := getattr(args, field)) is not None}
    if not named:
        return BYTES
    if args.tokenizer_type is None:
        raise EppError(f"{flag_of(next(iter(named)))} needs --tokenizer-type")
    return megatron_encoder({fields[name]: value for name, value in named.items()}, shlex.join(flag_words(named)))


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("files").add_argument
    inputs = "folders (a document per file), files of JSONL (compressed or not) or Parquet, or single files"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    outputs = f"writes PREFIX.bin, PREFIX.idx for --data-path PREFIX, and PREFIX{SUFFIX}"
    add("--output-prefix", required=True, metavar="PREFIX", help=outputs)
    usual = f"(default: {' '.join(SUFFIXES)}; with --chat {' '.join(RECORD_SUFFIXES)})"
    suffixes = f"files to take from folders {usual}, compressed (.gz, .bz2, .xz, .zst) or not"
    add("--suffixes", nargs="+", metavar=".SUFFIX", help=suffixes)
    key = "where a line or a row holds its document (default: text; with --chat messages or conversations)"
    add("--json-key", metavar="KEY", help=key)
    end = "end documents with a token (default: yes; with --chat where the last answer has no stop token)"
    add("--append-eod", action=argparse.BooleanOptionalAction, help=end)
    add("--overwrite", action="store_true", help="replace the files of an earlier pair of this prefix")
    add_tokenizer_arguments(parser)
    add = parser.add_argument_group(
        "chats",
        "lines of JSONL or rows of Parquet with a list of messages, each with role and content, or as ShareGPT has them with "
        "from and value, for a Hugging Face tokenizer with a chat template",
    ).add_argument
    chat = f"every line is a conversation; also writes PREFIX{MASK_SUFFIX}, the trained tokens"
    add("--chat", action="store_true", help=chat)
    add("--train-on", nargs="+", metavar="ROLE", help=f"roles whose messages are trained (default: {ASSISTANT})")
    own = "each as a sample of its own where the chat template changes earlier answers"
    turns = f"which answers are trained: all, {own}, or the last of each conversation (default: all)"
    add("--chat-turns", choices=TURNS, default=TURNS[0], help=turns)
    template = "Jinja template in place of the tokenizer's own (default: the tokenizer's)"
    add("--chat-template", metavar="FILE", help=template)


def run(args: Namespace) -> int:
    of_chats = {"--train-on": args.train_on, "--chat-template": args.chat_template, "--chat-turns": args.chat_turns != TURNS[0]}
    if not args.chat and any(of_chats.values()):
        raise EppError(f"{next(flag for flag, value in of_chats.items() if value)} is for conversations: add --chat")
    if not args.overwrite:
        refuse_existing(args.output_prefix)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("megatron_epp").setLevel(logging.INFO)
    with warnings.catch_warnings():
        # On import Megatron warns of missing GPU libraries, which play no part here.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        encoder = encoder_from(args)
        with progress(f"preparing {', '.join(map(str, args.input))}"):  # loading Megatron's writer of .idx takes seconds, too
            chat = (args.train_on or [ASSISTANT], args.chat_template, args.chat_turns) if args.chat else None
            how = {"append_eod": args.append_eod, "suffixes": args.suffixes, "json_key": args.json_key}
            how["chat"] = chat and chat_encoder(encoder, *chat)
            summary = prepare(args.input, args.output_prefix, encoder=encoder, **how)
    say(str(summary))
    return 0


EXAMPLE = """\
example: a folder of text files, with the tokenizer of Llama 3
  megatron-epp prepare --input texts --output-prefix documents \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B
conversations, of which the assistant's messages are trained
  megatron-epp prepare --chat --input chats.jsonl --output-prefix chats \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B-Instruct
"""
