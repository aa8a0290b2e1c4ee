"""Parameters of a model, counted from Megatron's flags, and the model in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_epp.tools.formulas.library import shape_of
from megatron_epp.tools.formulas.model_shape import RECURRENT, ModelShape, RecurrentShape

Flags = Mapping[str, Any]
_ATTENTION = "*"


def parameters_of(flags: Flags) -> int:
    """Count a model's parameters, vectors and multi-token prediction left out. Raises `EppError` for a bad list of layers."""
    shape = shape_of(dict(flags))
    ends = 2 if flags.get("untie_embeddings_and_output_weights") else 1
    counts = Counter(symbol for kinds in kinds_of_layers(shape) for symbol in kinds)
    return (
        ends * int(flags["vocab_size"]) * shape.hidden_size
        + counts[_ATTENTION] * shape.attention_parameters
        + counts["-"] * shape.with_one_mlp.mlp_parameters
        + counts["E"] * (shape.layer_parameters - shape.attention_parameters)
        + sum(counts[symbol] * RecurrentShape.of(shape, symbol).attention_parameters for symbol in RECURRENT if counts[symbol])
    )


def kinds_of_layers(shape: ModelShape) -> list[tuple[str, str]]:
    """List the mixer (``*`` attention, ``G`` delta net, ``M`` Mamba) and MLP (``-``, or ``E`` experts) of layers, if any."""
    mixers = shape.mixers.replace("+", _ATTENTION)
    if shape.is_hybrid:
        return [("", symbol) if symbol in "-E" else (symbol, "") for symbol in mixers]
    dense = range(shape.num_layers) if shape.num_experts is None else shape.dense_layers
    return [(mixers[layer % len(mixers)], "-" if layer in dense else "E") for layer in range(shape.num_layers)]


def summary(flags: Flags) -> str:
    """Describe a model in a line: layers, widths, what is in them, and the parameters in billions."""
    layers = kinds_of_layers(shape_of(dict(flags)))
    mixers, mlps = ([layer[at] for layer in layers] for at in (0, 1))
    parts = [f"{len(layers)} layers of {flags['hidden_size']:,}"]
    attention = "latent attention" if flags.get("multi_latent_attention") else "attention"
    for symbol, name in ((_ATTENTION, attention), ("G", "gated delta net"), ("M", "Mamba")):
        if number := mixers.count(symbol):
            parts.append(name if number == len(layers) else f"{number} of {name}")
    if flags.get("window_size"):
        parts.append(f"windows {flags['window_size']}")
    if number := mlps.count("E"):
        where = "" if number == len(layers) else f" in {number}"
        parts.append(f"{flags['num_experts']} experts{where}, {flags.get('moe_router_topk', 2)} for each token")
    if depths := flags.get("mtp_num_layers"):
        parts.append(f"multi-token prediction of depth {depths}")
    return f"{', '.join(parts)}: {parameters_of(flags) / 1e9:,.1f}B parameters" + (" without it" if depths else "")
