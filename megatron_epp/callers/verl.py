"""verl: loaded by its entry-point group ``verl.plugins`` as soon as this package is installed next to it.

Plans are installed behind the import of its Megatron engine, which only processes that train have. The engine packs jagged
tokens, and pads every sequence to a multiple of the ranks that share it.
"""

from __future__ import annotations

from typing import Any

from megatron_epp.callers import install_behind


def padded_lengths(item: Any) -> list[int]:
    """Return the lengths of a microbatch's sequences as the engine pads them."""
    from megatron_epp.mcore.iteration.wrap import sharing_ranks

    tensor, context = sharing_ranks()
    multiple = tensor * (2 * context if context > 1 else 1)
    return [-(-length // multiple) * multiple for length in item["input_ids"].offsets().diff().tolist()]


def unread(item: Any) -> list[int] | None:
    """Return all but the last token of each prompt: losses read log-probabilities of responses. None without jagged prompts."""
    prompts = item["prompts"] if {"prompts", "responses"} <= {*item.keys()} else None
    return [length - 1 for length in prompts.offsets().diff().tolist()] if getattr(prompts, "is_nested", False) else None


def load() -> None:
    """Do nothing: importing this file is what counts, and an entry point names something in it."""


install_behind("verl.workers.engine.megatron.transformer_impl", shape_of=padded_lengths, unread_of=unread)
