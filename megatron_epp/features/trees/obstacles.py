"""Models that run every sample by itself, for a token in common is not the same token in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_REASONS = {
    "experts, whose losses and capacity count a token once for every sample": ("num_experts", "num_moe_experts"),
    "dropout, which is another for every sample": ("hidden_dropout", "attention_dropout"),
    "FP8 or FP4, whose scales follow all tokens": ("fp8", "fp8_format", "fp4", "fp4_format"),
    "multi-token prediction": ("mtp_num_layers",),
}
"""Reasons, with the names by which Megatron's flags, the file of a model, or a model's config say that it has them."""


def obstacle_of(value_of: Callable[[str], Any]) -> str:
    """Return why a model runs every sample by itself, by the values of its flags or its config; empty if it may share prefixes.

    `value_of` returns None for what these do not have.
    """
    return next((reason for reason, names in _REASONS.items() if any(map(value_of, names))), "")
