"""slime: ``--custom-megatron-init-path megatron_epp.callers.slime.init``.

It packs a microbatch's sequences and pads them together, to a multiple of its ``--data-pad-size-multiplier`` and of the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_epp.callers import install

_MULTIPLIER = 128
"""Its default of that flag."""


def unread(item: Mapping[str, Any]) -> list[int] | None:
    """Return all but the last token of each prompt: losses read logits of responses alone. None without responses."""
    if (responses := item.get("response_lengths")) is None:
        return None
    return [int(total) - int(response) - 1 for total, response in zip(item["total_lengths"], responses, strict=True)]


def init(args: Any) -> None:
    """Install plans, if the environment variable says so: slime calls this when Megatron is initialised."""
    multiple = int(getattr(args, "data_pad_size_multiplier", _MULTIPLIER)) * int(args.tensor_model_parallel_size)

    def padded_lengths(item: Mapping[str, Any]) -> list[int]:
        lengths = [*map(int, item["total_lengths"])]
        return [*lengths, -sum(lengths) % multiple]

    install(shape_of=padded_lengths, unread_of=unread)
