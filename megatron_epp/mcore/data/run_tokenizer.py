"""Identity of a run's tokenizer, by which tokens of documents are checked."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_epp.data.token_record import Tokenizer, digest_of


def identity_of(tokenizer: Any, options: Any) -> Tokenizer:
    """Return the properties by which tokenizers differ; options are a ``TokenizerConfig`` or parsed arguments."""
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
