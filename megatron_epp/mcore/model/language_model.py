"""Language model inside of a model chunk: the chunk itself, or a part of a multimodal model."""

from __future__ import annotations

from typing import Any

_INSIDE = ("module", "thinker", "language_model")
"""Attributes that lead from a wrapper, or a multimodal model, to the language model inside."""


def language_model_of(model: Any) -> Any:
    """Return the part of a model chunk with the decoder: the model, or the language model inside; None without a decoder.

    A multimodal model may show its language model's decoder as its own.
    """
    while (inner := next((part for name in _INSIDE if (part := getattr(model, name, None)) is not None), None)) is not None:
        model = inner
    return model if getattr(getattr(model, "decoder", None), "layers", None) is not None else None


def axes_of(language_model: Any) -> int:
    """Return the axes of a token's position: 3 where time, height and width turn parts of a head (M-RoPE), else 1."""
    return 3 if getattr(language_model, "position_embedding_type", None) == "mrope" else 1
