"""Language model inside of a model chunk: the chunk itself, or a part of a multimodal model."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from megatron_epp.plan.attributes import having

_INSIDE = ("module", "thinker", "language_model")
"""Attributes that lead from a wrapper, or a multimodal model, to the language model inside."""


def language_model_of(model: Any) -> Any:
    """Return the model with the decoder: a model chunk, or the language model in a multimodal one; None without a decoder."""
    while (inner := inside_of(model)) is not None:
        model = inner
    return model if getattr(getattr(model, "decoder", None), "layers", None) is not None else None


def inside_of(model: Any) -> Any:
    """Return the model inside a wrapper, or a multimodal model; None if there is none."""
    return next((part for name in _INSIDE if (part := getattr(model, name, None)) is not None), None)


def axes_of(language_model: Any) -> int:
    """Return the axes of a token's position: 3 where time, height and width turn parts of a head (M-RoPE), else 1."""
    return 3 if getattr(language_model, "position_embedding_type", None) == "mrope" else 1


def own_positions(language_model: Any) -> AbstractContextManager[None]:
    """Have a model with several axes turn by the positions that it gets in the body, which are this context-parallel rank's."""
    alone = SimpleNamespace(size=lambda: 1)  # a process group of this rank, as far as rotary embeddings ask
    return having(language_model.rotary_pos_emb, cp_group=alone)


def outputs_of(layer: Any) -> int | None:
    """Return the number of outputs of an output layer over all ranks; None if it does not say."""
    weight = getattr(layer, "weight", None)
    outputs = getattr(layer, "output_size", getattr(layer, "out_features", None))
    return len(weight) if outputs is None and isinstance(weight, Tensor) else outputs
