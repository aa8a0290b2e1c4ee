"""Encoders from text to token ids: byte-level, or any tokenizer that Megatron builds; and from conversations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_epp.data.token_record import Tokenizer, identity_of, is_of_hub, missing_tokenizer
from megatron_epp.mcore import releases
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import naming_file, one_line, read_text

if TYPE_CHECKING:  # which trainings do not read
    from megatron_epp.data.chat import ApplyTemplate, ChatEncoder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """Conversion of a document's bytes to token ids; the rest is for tokenizers that have chat templates."""

    encode: Callable[[bytes], np.ndarray]  # raises UnicodeDecodeError for bytes it cannot read
    tokenizer: Tokenizer  # the description that is recorded with the tokens
    flags: str  # Megatron's command-line flags for training on these tokens
    apply_template: ApplyTemplate | None = None
    # The tokenizer's own chat template, or several by name; None if it has none
    template: str | Mapping[str, str] | None = None
    decode: Callable[[Sequence[int]], str] | None = None  # converts ids to text, special tokens included
    stops: frozenset[int] = frozenset()  # special tokens, at which generation can stop


# Ids 0 to 255 are the bytes of the document and 256 ends it. Megatron's NullTokenizer ends documents with its last id.
BYTES = Encoder(
    encode=lambda raw: np.frombuffer(raw, dtype=np.uint8),
    tokenizer=Tokenizer(kind="NullTokenizer", model="bytes", vocab_size=257, eod=256, digest=None),
    flags="--tokenizer-type NullTokenizer --vocab-size 257",
)


def megatron_encoder(options: Mapping[str, object], flags: str) -> Encoder:
    """Build an encoder from ``TokenizerConfig``'s options, which a run gives as `flags`. Raises `EppError`."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    kind, model = str(options.get("tokenizer_type")), options.get("tokenizer_model")
    name = "" if model is None else str(model)
    if missing := missing_tokenizer(kind, name) if name else None:
        raise EppError(f"--tokenizer-model: {missing}")
    absent = f"there is no folder {name} here, so the tokenizer is that of Hugging Face's hub" if is_of_hub(kind, name) else ""
    if absent:
        logger.warning("%s: it is downloaded unless it has been before", absent)
    config = releases.tokenizer_settings(options)
    try:
        tokenizer = build_tokenizer(config)
    except Exception as error:  # each tokenizer library raises its own kinds
        why = f"{absent}, which does not give it" if absent else f"Megatron cannot build the tokenizer {flags}"
        raise EppError(f"{why}: {one_line(error)}") from error

    def encode(raw: bytes) -> np.ndarray:
        return np.asarray(tokenizer.tokenize(raw.decode("utf-8")), dtype=np.int64)

    identity = identity_of(tokenizer, config)
    if config.tokenizer_type != "HuggingFaceTokenizer":
        return Encoder(encode, identity, flags)
    model = tokenizer._tokenizer.tokenizer  # Megatron wraps it twice
    decode = partial(model.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    added = (number for number, token in model.added_tokens_decoder.items() if token.special)
    stops = frozenset(map(int, (*added, *model.all_special_ids)))
    return Encoder(encode, identity, flags, tokenizer.apply_chat_template, tokenizer.chat_template, decode, stops)


def chat_encoder(
    encoder: Encoder, roles: Sequence[str], template_file: str | Path | None = None, turns: str = "all"
) -> ChatEncoder:
    """Build a chat encoder, with the tokenizer's template by default. Raises `EppError` without one, or an unreadable file."""
    if encoder.apply_template is None:
        todo = "pass --tokenizer-type HuggingFaceTokenizer and --tokenizer-model"
        raise EppError(f"--chat needs a tokenizer with a chat template: {todo} (the tokenizer is {encoder.tokenizer})")
    template = encoder.template if template_file is None else None
    if template_file is not None:
        with naming_file(template_file):
            template = read_text(template_file)
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        why = "as is usual for models that were not trained on chats"
        todo = "pass the template of a chat model with --chat-template FILE"
        raise EppError(f"the tokenizer {encoder.tokenizer} has no chat template, {why}; {todo}")
    from megatron_epp.data.chat import ChatEncoder

    return ChatEncoder(encoder.apply_template, template, tuple(roles), turns, encoder.decode, encoder.stops)
