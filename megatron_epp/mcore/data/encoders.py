"""Encoders from text to token ids: byte-level, or any tokenizer that Megatron builds."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_epp.data.token_record import Tokenizer, digest_of
from megatron_epp.plan.errors import EppError


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """Conversion of a document's bytes to token ids.

    Attributes:
        encode: converts bytes to integer ids; raises UnicodeDecodeError for bytes it cannot read.
        tokenizer: the description that is recorded with the tokens.
        flags: Megatron's command-line flags for training on these tokens.
    """

    encode: Callable[[bytes], np.ndarray]
    tokenizer: Tokenizer
    flags: str


# Ids 0 to 255 are the bytes of the document and 256 ends it. Megatron's NullTokenizer ends documents with its last id.
BYTES = Encoder(
    encode=lambda raw: np.frombuffer(raw, dtype=np.uint8),
    tokenizer=Tokenizer(kind="NullTokenizer", model="bytes", vocab_size=257, eod=256, digest=None),
    flags="--tokenizer-type NullTokenizer --vocab-size 257",
)


def megatron_encoder(options: Mapping[str, object], flags: str) -> Encoder:
    """Build an encoder from any tokenizer that Megatron can build.

    Args:
        options: fields of Megatron's ``TokenizerConfig``, at least ``tokenizer_type``.
        flags: the same options as command-line flags of Megatron.

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

    def encode(raw: bytes) -> np.ndarray:
        return np.asarray(tokenizer.tokenize(raw.decode("utf-8")), dtype=np.int64)

    return Encoder(encode, identity_of(tokenizer, config), flags)


def identity_of(tokenizer: Any, options: Any) -> Tokenizer:
    """Return the properties that distinguish a tokenizer from others; options are a ``TokenizerConfig`` or parsed arguments."""
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
    """Return the identity of the tokenizer that Megatron has built for this run, or would build."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import global_vars

    return identity_of(global_vars._GLOBAL_TOKENIZER or build_tokenizer(args), args)
