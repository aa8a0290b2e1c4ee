"""Record of the tokenizer of a ``.bin``/``.idx`` pair in a small JSON file next to it, and checks against a run's tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.reading import brief, naming_file, nearest, of_type, read_text
from megatron_epp.plan.writing import write_text

SUFFIX = ".tokenizer.json"  # suffix of the file, after the prefix of the pair
_IDS = "NullTokenizer"  # the kind of tokenizer that reads ids instead of text
_SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs; it's 2.50 EUR (or $3,14), isn't it?\n\n"
    "\tdef f(x: int) -> list[str]:\n        return [f'{x!r}_{i:>8}' for i in range(10**6)]  # https://example.org/?q=a%20b\n"
    "Zw\u00f6lf Boxk\u00e4mpfer, \u00e7a co\u00fbte combien? \u00bfCu\u00e1ntos a\u00f1os? "
    "\u0421\u044a\u0435\u0448\u044c \u0435\u0449\u0451 \u03b3\u03bb\u03ce\u03c3\u03c3\u03b1 \u05e9\u05dc\u05d5\u05dd "
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694 "
    "\U0001f600\u200d\u2192 \u2211\u2a7d\u221e  \r\n"
)
"""Text that different tokenizers encode differently: scripts, numbers, code, spaces."""
_OF_A_HUB = frozenset({"HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer"})
_OF_A_FILE = frozenset({"SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"})
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    kind: str  # Megatron's ``tokenizer_type``
    model: str | None  # its name or path; None if it has none
    vocab_size: int  # all ids are below it, `eod` included, which ends a document
    eod: int | None
    digest: str | None  # of a text's ids (`digest_of`); None if it reads ids instead of text (``NullTokenizer``)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.model, f"(vocabulary of {self.vocab_size:,})")))


def missing_tokenizer(kind: str, model: str) -> str | None:
    """Return which file or folder of a tokenizer is missing; None if nothing is, or if it may be the name of one on a hub."""
    if os.path.exists(model) or "://" in model:
        return None
    if kind in _OF_A_FILE:
        return f"there is no file {model}"
    parent, slash, _ = model.rpartition("/")
    if kind not in _OF_A_HUB or (_HUB_NAME.fullmatch(model) and not (slash and os.path.isdir(parent))):
        return None
    others = os.listdir(parent or "/") if os.path.isdir(parent or "/") else []
    return f"there is no folder {model}{nearest(os.path.basename(model), others)}"


def is_of_hub(kind: str, model: str | None) -> bool:
    """True if a tokenizer is no file or folder of this machine but may be the name of one on a hub."""
    return model is not None and kind in _OF_A_HUB and not os.path.exists(model) and not missing_tokenizer(kind, model)


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Record of a pair's tokens, with numbers that tell it from another; `flags` are Megatron's for this tokenizer."""

    tokenizer: Tokenizer
    flags: str
    num_documents: int
    num_tokens: int
    max_token: int

    def save(self, path: str) -> None:
        write_text(path, json.dumps(_FORMAT.head | asdict(self), indent=1) + "\n")


def load_record(prefix: str) -> TokenRecord | None:
    """Read the record of a pair; None if there is none. Raises `EppError` if it cannot be read."""
    path = prefix + SUFFIX
    if not os.path.exists(path):
        return None
    try:
        with naming_file(path):
            return _FORMAT.parse(TokenRecord, read_text(path), "the record")
    except EppError as error:
        reason, todo = error.message.removeprefix(f"{path}: "), "make the pair again with `megatron-epp prepare`"
        why = f"{path} does not say which tokenizer made {prefix}.bin ({reason})"
        raise EppError(f"{why}; {todo}, or remove that file") from error


def _printable(value: Any) -> str:
    """Return text of a record, which is printed later. Raises `EppError` if it is none, or has control characters."""
    if not of_type(str, value, "text").isprintable():
        raise EppError(f"{brief(value)} is not text without control characters")
    return str(value)


_CODEC = Codec({str: _printable}, least={"vocab_size": 1}, least_of_others=0)
_FORMAT = FileFormat("record", "megatron-epp/tokenizer", 1, _CODEC)


def check_tokenizer(prefix: str, record: TokenRecord, run: Tokenizer, *, masks_eod: bool = False) -> None:
    """Raise `EppError` if tokens are not from a run's tokenizer, or with `masks_eod`, its ends of documents are others.

    Tokenizers are the same if they make the same ids of a text; ids and bytes fit a ``NullTokenizer`` that includes them.
    """
    tokenizer = record.tokenizer
    same = tokenizer.digest == run.digest and (tokenizer.digest is not None or tokenizer.kind == run.kind)
    if not same or record.max_token >= run.vocab_size:
        raise _refusal(prefix, record, str(run))
    if masks_eod and tokenizer.eod is not None and tokenizer.eod != run.eod:
        own = f"this run's tokenizer ({run}) ends them with {run.eod}, so the loss cannot be masked there"
        remedies = Remedy("drop", "eod_mask_loss"), Remedy("use", value=record.flags)
        raise EppError(f"documents of {prefix} end with token {tokenizer.eod}, and {own}", *remedies)


def check_kind(prefix: str, record: TokenRecord, kind: str, model: str | None) -> None:
    """Raise `EppError` if tokens are text and a run's tokenizer, by its flags, reads bytes or ids, or the reverse."""
    if (record.tokenizer.kind == _IDS) != (kind == _IDS):
        raise _refusal(prefix, record, " ".join(filter(None, (kind, model))))


def _refusal(prefix: str, record: TokenRecord, named: str) -> EppError:
    return EppError(
        f"{prefix} has tokens of {record.tokenizer}, and this run's tokenizer is {named}: train with {record.flags}, or "
        "prepare the documents again with the run's"
    )


def check_ids(prefix: str, ids: np.ndarray, vocab_size: int, first: int = 0) -> None:
    if len(ids) and not (ids.max() < vocab_size and (ids.dtype.kind == "u" or ids.min() >= 0)):
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        what = f"{prefix} has token {int(ids[at]):,}, and this run's tokenizer has a vocabulary of {vocab_size:,}"
        why = f"these are the tokens of another tokenizer (after {first + at:,} tokens of {prefix}.bin)"
        settings = "tokenizer_type", "tokenizer_model", "vocab_size"
        raise EppError(f"{what}: {why}", *(Remedy("change", setting) for setting in settings))


def digest_of(tokenize: Callable[[str], Iterable[int]]) -> str | None:
    """Digest (16 hex digits) of a tokenizer's ids of a sample text, without ids added to any text; None if it reads ids."""
    try:
        around = set(tokenize(""))
        ids = [int(each) for each in tokenize(_SAMPLE) if each not in around]
    except Exception:  # each tokenizer library raises its own kinds
        return None
    return hashlib.sha256(np.asarray(ids, dtype="<i8").tobytes()).hexdigest()[:16]


def identity_of(tokenizer: Any, options: Any) -> Tokenizer:
    """Return the properties by which tokenizers differ; options are a ``TokenizerConfig`` or parsed arguments."""
    try:
        eod = None if tokenizer.eod is None or tokenizer.eod < 0 else tokenizer.eod
    except (AttributeError, NotImplementedError):
        eod = None
    model = getattr(options, "tokenizer_model", None) or getattr(options, "vocab_file", None)
    vocab_size = max(tokenizer.vocab_size, 1 + (eod or 0))
    return Tokenizer(str(options.tokenizer_type), model, vocab_size, eod, digest_of(tokenizer.tokenize))
