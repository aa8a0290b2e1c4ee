"""Parameters of a model, counted from Megatron's flags, and the model in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from megatron_epp.plan.layer_flags import by_layer, pattern_of
from megatron_epp.tools.formulas.layer_sizes import DeltaNet, StateSpace
from megatron_epp.tools.formulas.library import delta_net, mixers_of, shape_of, state_space

Flags = Mapping[str, Any]
_ATTENTION, _DELTA, _STATES = "*", "G", "M"


def parameters_of(flags: Flags) -> int:
    """Count a model's parameters, vectors and multi-token prediction left out. Raises `EppError` for a bad list of layers."""
    shape = shape_of({**flags, "num_layers": 2, "moe_layer_freq": [0, 1]})  # has layers with and without experts, if any
    ends = 2 if flags.get("untie_embeddings_and_output_weights") else 1
    counts = Counter(symbol for kinds in kinds_of_layers(flags) for symbol in kinds)
    mixers: dict[str, Callable[[Flags], DeltaNet | StateSpace]] = {_DELTA: delta_net, _STATES: state_space}
    return (
        ends * int(flags["vocab_size"]) * shape.hidden_size
        + counts[_ATTENTION] * shape.attention_parameters
        + counts["-"] * shape.with_one_mlp.mlp_parameters
        + counts["E"] * (shape.layer_parameters - shape.attention_parameters)
        + sum(counts[symbol] * sizes(flags).parameters(shape.hidden_size) for symbol, sizes in mixers.items() if counts[symbol])
    )


def kinds_of_layers(flags: Flags) -> list[tuple[str, str]]:
    """List the mixer (``*`` attention, ``G`` delta net, ``M`` Mamba) and MLP (``-``, or ``E`` experts) of layers, if any."""
    mixers = mixers_of(flags).replace("+", _ATTENTION)
    if pattern_of(flags):
        return [("", symbol) if symbol in "-E" else (symbol, "") for symbol in mixers]
    count = int(flags["num_layers"])
    has_experts = by_layer(flags.get("moe_layer_freq") or 1, count) if flags.get("num_experts") else [False] * count
    return [(mixers[layer % len(mixers)], "E" if routed else "-") for layer, routed in enumerate(has_experts)]


def summary(flags: Flags) -> str:
    """Describe a model in a line: layers, widths, what is in them, and the parameters in billions."""
    layers = kinds_of_layers(flags)
    mixers, mlps = ([layer[at] for layer in layers] for at in (0, 1))
    parts = [f"{len(layers)} layers of {flags['hidden_size']:,}"]
    attention = "latent attention" if flags.get("multi_latent_attention") else "attention"
    for symbol, name in ((_ATTENTION, attention), (_DELTA, "gated delta net"), (_STATES, "Mamba")):
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
