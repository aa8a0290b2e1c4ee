"""How text becomes token ids: bytes, or any tokenizer that Megatron builds."""

from __future__ import annotations

import dataclasses
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_epp.cli.types import count
from megatron_epp.data.token_record import Tokenizer, digest_of
from megatron_epp.plan.errors import EppError


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """How the bytes of a document become token ids.

    Attributes:
        encode: bytes to integer ids; raises UnicodeDecodeError for bytes it cannot read.
        vocab_size: ids are below it, `eod` included.
        eod: the id that ends a document; None when the tokenizer has none.
        flags: what Megatron needs on its command line to train on these tokens.
        kind, model, digest: see `Tokenizer`.
    """

    encode: Callable[[bytes], np.ndarray]
    vocab_size: int
    eod: int | None
    flags: str
    kind: str = "NullTokenizer"
    model: str | None = None
    digest: str | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """What is recorded of it beside the tokens."""
        return Tokenizer(self.kind, self.model, self.vocab_size, self.eod, self.digest)


# Ids 0 to 255 are the bytes of the document and 256 ends it. Megatron's NullTokenizer ends documents with its last id.
BYTES = Encoder(
    encode=lambda raw: np.frombuffer(raw, dtype=np.uint8),
    vocab_size=257,
    eod=256,
    flags="--tokenizer-type NullTokenizer --vocab-size 257",
    model="bytes",
)


def megatron_encoder(options: Mapping[str, object], flags: str) -> Encoder:
    """Any tokenizer that Megatron builds.

    Args:
        options: fields of Megatron's ``TokenizerConfig``, at least ``tokenizer_type``.
        flags: the same as Megatron's command line takes them.

    Raises:
        EppError: Megatron cannot build it.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config import TokenizerConfig

    # Padding the vocabulary concerns the model, not the data.
    config = TokenizerConfig(**options, pad_vocab_size=False)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    try:
        tokenizer = build_tokenizer(Namespace(**fields))
    except Exception as error:  # each tokenizer library raises its own kinds
        raise EppError(f"Megatron cannot build the tokenizer {flags}: {error}") from error
    what = identity_of(tokenizer, config)

    def encode(raw: bytes) -> np.ndarray:
        return np.asarray(tokenizer.tokenize(raw.decode("utf-8")), dtype=np.int64)

    return Encoder(encode, what.vocab_size, what.eod, flags, what.kind, what.model, what.digest)


def identity_of(tokenizer: Any, options: Any) -> Tokenizer:
    """What tells a tokenizer from others.

    Args:
        tokenizer: of Megatron's.
        options: what it was built from: a ``TokenizerConfig`` or parsed arguments.
    """
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        eod = None
    if eod is not None and eod < 0:
        eod = None
    model = getattr(options, "tokenizer_model", None) or getattr(options, "vocab_file", None)
    vocab_size = max(tokenizer.vocab_size, 1 + (eod or 0))
    return Tokenizer(str(options.tokenizer_type), model, vocab_size, eod, digest_of(tokenizer.tokenize))


def identity_of_run(args: Namespace) -> Tokenizer:
    """Of the tokenizer that Megatron has built for this run, or would build."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import global_vars

    return identity_of(global_vars._GLOBAL_TOKENIZER or build_tokenizer(args), args)


# Flags and, where it differs, the field of Megatron's TokenizerConfig that each sets.
_TOKENIZER_FLAGS: dict[str, dict[str, Any]] = {
    "--tokenizer-type": {"metavar": "NAME", "help": "HuggingFaceTokenizer, SentencePieceTokenizer, ... (default: bytes)"},
    "--tokenizer-model": {"metavar": "NAME|FILE", "help": "of a Hugging Face model, or its file or folder"},
    "--vocab-file": {"metavar": "FILE", "help": "of GPT2BPETokenizer and its kin"},
    "--merge-file": {"metavar": "FILE", "help": "of GPT2BPETokenizer and its kin"},
    "--vocab-size": {"metavar": "N", "type": count, "help": "of NullTokenizer, whose text is ids, and TikTokenizer"},
    "--tiktoken-pattern": {"metavar": "NAME", "help": "of TikTokenizer"},
    "--tokenizer-special-tokens": {"metavar": "TOKEN", "nargs": "+", "dest": "special_tokens", "help": "to add to it"},
    "--tokenizer-hf-no-include-special-tokens": {
        "action": "store_true",
        "help": "leave out what a Hugging Face tokenizer puts around every text",
    },
    "--trust-remote-code": {"action": "store_true", "help": "run code that comes with a Hugging Face tokenizer"},
}


def add_tokenizer_arguments(parser: ArgumentParser) -> None:
    """Megatron's tokenizer flags, as far as they concern how text becomes ids."""
    group = parser.add_argument_group(
        "tokenizer",
        "that of the model that is to be trained, by the flags of its training. Without any, tokens are bytes (0-255, and 256 "
        "ends a document), for models made for bytes",
    )
    for flag, settings in _TOKENIZER_FLAGS.items():
        unsaid = "" if "default" in settings["help"] else " (default: none)"
        group.add_argument(flag, default=None, **settings | {"help": settings["help"] + unsaid})


def encoder_from(args: Namespace) -> Encoder:
    """The encoder that the flags of `add_tokenizer_arguments` ask for; bytes when none was given."""
    given: dict[str, object] = {}
    flags: list[str] = []
    for flag, settings in _TOKENIZER_FLAGS.items():
        field = settings.get("dest", flag.removeprefix("--").replace("-", "_"))
        value = getattr(args, field)
        if value is not None:
            given[field] = value
            flags += [flag, *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    if not given:
        return BYTES
    if args.tokenizer_type is None:
        raise EppError(f"{flags[0]} needs --tokenizer-type")
    return megatron_encoder(given, shlex.join(flags))
