"""Changes to a model that another program has built, so that plans can run it and that program goes on as before.

Attention and rotary angles are replaced in place, for calls within a plan: evaluation and generation call the original ones.
Parameters, their names and checkpoints stay as they are.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_epp.losses import Average
from megatron_epp.mcore.arguments.refusals import RULES
from megatron_epp.mcore.arguments.rule import Door, problems_of
from megatron_epp.mcore.model.adopt import number_attentions
from megatron_epp.mcore.model.core_attention import RELAY, ChunkParams, RelayAttention, is_causal
from megatron_epp.mcore.model.kinds import adopt_layers, mixes_tokens, of_experts
from megatron_epp.mcore.model.language_model import language_model_of, outputs_of
from megatron_epp.mcore.model.replaced import HOOKS, assigned, put
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.mcore.releases import multiplying_output_layers

_ATTENTION = "core_attention"


def _relay_in(original: Any, owner: Any) -> RelayAttention:
    config, channels, scale = owner.config, (None, None), owner.config.softmax_scale
    if scale is None and not getattr(config, "apply_query_key_layer_scaling", False):
        scale = getattr(original, "softmax_scale", None)  # where it is not that of the number of channels
    if isinstance(owner, MultiLatentAttention):
        scale, channels = owner.softmax_scale, (owner.q_head_dim, config.v_head_dim)
    return RelayAttention(
        config,
        original.layer_number,
        softmax_scale=None if scale is None else float(scale),
        k_channels=channels[0],
        v_channels=channels[1],
        softmax_offset=getattr(original, "softmax_offset", None),
    )


def _attend(relay: RelayAttention, original: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
    in_plan = isinstance(named.get("packed_seq_params"), ChunkParams)
    return relay.forward(*args, **named) if in_plan else original(*args, **named)


def refusal(model: torch.nn.Module, average: Average, recomputes: bool = False) -> str:
    """Return what of a model chunk plans cannot run with a loss of this average; empty if `adopt_built` can let them.

    With `recomputes`, the model's own settings may decide what it recomputes.
    """
    inside = language_model_of(model)
    obstacle = "" if getattr(inside, "has_relay", False) else _refusal(inside, recomputes)
    obstacle = obstacle or next(of_experts("router_problems", get_model_config(inside), Door.SLICED_MODEL, average), "")
    return obstacle and f"samples cannot be cut for this {type(unwrap_model(model)).__name__}: {obstacle}"


def adopt_built(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Let plans run a model chunk, for which there is no `refusal`, or the language model in a multimodal one; only once."""
    bare: Any = language_model_of(model)
    if getattr(bare, "has_relay", False):
        return
    for module in bare.modules():
        attention = vars(module).get("_modules", {}).get(_ATTENTION)
        if attention is not None:
            vars(attention)[RELAY] = relay = _relay_in(attention, module)  # no submodule: names in checkpoints stay
            put(attention, "forward", functools.partial(_attend, relay, attention.forward), HOOKS, wraps=False)
    number_attentions(bare)
    adopt_layers(bare, args)
    bare.has_relay = True


def _refusal(model: Any, recomputes: bool) -> str:
    if model is None:
        return "it has no decoder of Megatron's"
    config = get_model_config(model)
    # The fused rotation reads angles by a token's place in the batch, not by its position in the sequence.
    if config.multi_latent_attention and config.apply_rope_fusion:
        return "its rotation is fused: build it with apply_rope_fusion=False"
    if getattr(config, "mtp_num_layers", None):
        return "a loss of samples trains no multi-token prediction: build it with mtp_num_layers=None"
    if config.recompute_granularity is not None and not recomputes:
        return f"recompute_granularity={config.recompute_granularity!r}: leave it out, plans choose what recomputes"
    if problems := [*problems_of(config, Door.SLICED_MODEL, RULES)]:
        return "; ".join(problems)
    layer = getattr(model, "output_layer", None)
    if layer is not None and getattr(layer, "gather_output", False) and layer.tp_group.size() > 1:
        return "its output layer gathers logits: build it with parallel_output=True"
    if layer is not None and type(layer) not in multiplying_output_layers() and outputs_of(layer) != 1:
        return f"its output layer is a {type(layer).__name__}"
    for name, module in model.named_modules():
        is_core = name.rpartition(".")[2] == _ATTENTION
        if (is_core or mixes_tokens(module)) and assigned(module, ("forward",)):
            return f"{name} has a forward that is not Megatron's"
        if hasattr(module, _ATTENTION) and not is_causal(mask := getattr(module, "attn_mask_type", None)):
            return f"{name} attends by {mask}, and slices to earlier tokens of their sequence alone"
        if not is_core:
            continue
        if not is_installed(type(module)):
            return f"{name} is a {type(module).__name__}, which is not Megatron's"
        if own := [weight for weight, _ in module.named_parameters() if weight != "softmax_offset"]:
            return f"{name} has parameters of its own, {', '.join(own)}"
    return ""
