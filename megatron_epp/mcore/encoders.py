"""How text becomes token ids: bytes, or any tokenizer that Megatron builds."""

from __future__ import annotations

import dataclasses
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_epp.schedule.errors import EppError


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """How the bytes of a document become token ids.

    Attributes:
        encode: bytes to integer ids; raises UnicodeDecodeError for bytes it cannot read.
        vocab_size: ids are below it, `eod` included.
        eod: the id that ends a document; None when the tokenizer has none.
        flags: what Megatron needs on its command line to train on these tokens.
    """

    encode: Callable[[bytes], np.ndarray]
    vocab_size: int
    eod: int | None
    flags: str


# Ids 0 to 255 are the bytes of the document and 256 ends it. Megatron's NullTokenizer ends documents with its last id.
BYTES = Encoder(
    encode=lambda raw: np.frombuffer(raw, dtype=np.uint8),
    vocab_size=257,
    eod=256,
    flags="--tokenizer-type NullTokenizer --vocab-size 257",
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
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        eod = None

    if eod is not None and eod < 0:
        eod = None

    def encode(raw: bytes) -> np.ndarray:
        return np.asarray(tokenizer.tokenize(raw.decode("utf-8")), dtype=np.int64)

    return Encoder(encode, max(tokenizer.vocab_size, 1 + (eod or 0)), eod, flags)


# Flags and, where it differs, the field of Megatron's TokenizerConfig that each sets.
_TOKENIZER_FLAGS: dict[str, dict[str, Any]] = {
    "--tokenizer-type": {},
    "--tokenizer-model": {},
    "--vocab-file": {},
    "--merge-file": {},
    "--vocab-size": {"type": int},
    "--tiktoken-pattern": {},
    "--tokenizer-special-tokens": {"nargs": "+", "dest": "special_tokens"},
    "--tokenizer-hf-no-include-special-tokens": {"action": "store_true"},
    "--trust-remote-code": {"action": "store_true"},
}


def add_tokenizer_arguments(parser: ArgumentParser) -> None:
    """Megatron's tokenizer flags, as far as they concern how text becomes ids."""
    group = parser.add_argument_group("tokenizer", "bytes (0-255, 256 ends a document) unless --tokenizer-type names another")
    for flag, settings in _TOKENIZER_FLAGS.items():
        group.add_argument(flag, default=None, help="as in training (default: none)", **settings)


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
