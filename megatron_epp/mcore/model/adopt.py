"""Changes that `--epp` makes to a model while Megatron builds it: our core attention, and rotary angles by position.

They are made in the models' constructors, whether a config, a `model_provider` or a script of the user's calls these.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.utils import unwrap_model

from megatron_epp.features import Asked, targets
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.layout import HYBRID_PATTERNS, placement_of, shards_vocabulary
from megatron_epp.mcore.arguments.refusals import refuse
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.setting_checks import pattern_problem
from megatron_epp.mcore.model import model_chunks
from megatron_epp.mcore.model.core_attention import RelayAttention, relay_of
from megatron_epp.mcore.model.kinds import adopt_layers, mixes_tokens
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.mcore.releases import bound
from megatron_epp.plan import EppError, Remedy

_SPECS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec", "mtp_block_spec")
"""Constructor parameters through which models receive the specs of their layers."""
_MIXERS = ("self_attention", "cross_attention", "mixer")


def construct(args: argparse.Namespace, original: Callable[..., None], *rest: Any, **named: Any) -> None:
    """Call Megatron's constructor of a model, the first of `rest`, so that it builds a model that plans can run.

    Raises `EppError` for a core attention that is not Megatron's, for settings that slices cannot have, and for a hybrid
    model's pattern without the placement's stages.
    """
    call = bound(original, *rest, **named)
    model = rest[0]
    # A provider of the user's may ask for more than the flags, which have been checked.
    refuse(call.arguments["config"], Door.SLICED_MODEL)
    vp_stage = call.arguments.get("vp_stage")
    if "transformer_layer_spec" not in call.arguments:  # a hybrid model
        pattern = next(filter(None, map(call.arguments.get, HYBRID_PATTERNS)), None)
        if problem := pattern_problem(pattern):
            raise ArgumentError(problem)
    # In copies: Megatron's specs may be constants of a module, which models without plans use, too.
    call.arguments |= {name: relayed(call.arguments[name]) for name in _SPECS if name in call.arguments}
    model_chunks.check_stage(call.arguments["config"], args, vp_stage)
    # Its fused rotation reads angles by a token's place in the batch, not by its position in the sequence.
    if getattr(call.arguments["config"], "multi_latent_attention", False):
        call.arguments["config"].apply_rope_fusion = False
    if args.epp_placement in ("v", "ring"):
        call.arguments |= model_chunks.ends(args, vp_stage)
        if "transformer_layer_spec" not in call.arguments:
            name, placement = next(filter(call.arguments.get, HYBRID_PATTERNS)), placement_of(args)
            stack = next(name for name in _SPECS if name in call.arguments)
            call.arguments[stack] = model_chunks.placed_stack(call.arguments[stack], call.arguments[name], placement, vp_stage)
            call.arguments[name] = model_chunks.placed_pattern(call.arguments[name], placement)
    original(*call.args, **call.kwargs)
    # All of it before data parallelism wraps the chunk, which makes buffers and hooks for the parameters that it finds.
    number_attentions(model)
    adopt_layers(model, args)
    for adopt in targets(Asked(args), "adopt"):
        adopt(model, args, vp_stage)
    if args.epp_placement == "v" and not shards_vocabulary(args):
        model_chunks.tie(model, args)
    model.has_relay = True


def check_adopted(model: torch.nn.Module) -> None:
    """Raise `EppError` for a model that was built without our attention."""
    bare = unwrap_model(model)
    if not any(getattr(part, "has_relay", False) for part in (bare, language_model_of(model))):
        raise EppError(f"--epp trains GPTModel and HybridModel; the script builds a {type(bare).__name__}")


def number_attentions(model: torch.nn.Module) -> None:
    """Number the attentions of a model chunk, by which the KV cache keeps their keys and values.

    Raises `EppError` if a module would mix tokens of different sequences, which only `RelayAttention` keeps separate, or if an
    attention is in two layers, whose keys and values would meet.
    """
    names: dict[RelayAttention, str] = {}
    repeated = (block for block in model.modules() if getattr(block, "mtp_use_repeated_layer", False))
    shared = [relay for block in repeated for part in block.modules() if (relay := relay_of(part))]  # the chunk's last
    inside = {part for module in model.modules() if mixes_tokens(module) for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):  # so that an attention in two layers is seen twice
        if (relay := relay_of(module)) is not None:
            if relay in names:
                raise EppError(
                    f"{names[relay]} and {name} are one attention in two layers, by which plans keep the keys and values of "
                    "slices: one layer's would take the place of the other's; give each layer an attention of its own"
                )
            relay.number = len(names)
            names[relay] = name
            relay.stride = len(shared) * (relay in shared)
        elif module not in inside and _mixes_tokens(name, module):
            raise EppError(
                f"{name} ({type(module).__name__}) mixes tokens without the attention of plans: sequences of a chunk would run "
                "into each other there, and slices lose its state; whole microbatches can be planned, neither cut nor packed",
                Remedy("set", "microbatches", "user"),
            )


def _mixes_tokens(name: str, module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.Conv1d):
        return module.kernel_size != (1,)
    if name.rpartition(".")[2] not in _MIXERS or isinstance(module, (IdentityOp, torch.nn.Identity)):
        return False
    return not any(relay_of(part) for part in module.modules())


def relayed(spec: Any) -> Any:
    """Return a copy of a layer, block or stack spec in which every `core_attention`, of any model, is `RelayAttention`. Raises
    `EppError` if one is not Megatron's.
    """
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(relayed, spec))
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    copied = copy.copy(spec)
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        is_attention = field.name == "core_attention" and value is not None
        if is_attention:
            _check_replaceable(value)
        setattr(copied, field.name, RelayAttention if is_attention else relayed(value))
    return copied


def _check_replaceable(attention: Any) -> None:
    if isinstance(attention, ModuleSpec):
        attention = get_module(attention)
    while isinstance(attention, functools.partial):
        attention = attention.func
    if attention is not RelayAttention and not is_installed(attention):
        name = getattr(attention, "__qualname__", type(attention).__qualname__)
        raise EppError(f"--epp puts its own attention in the place of {name}, which is not Megatron's: start without --epp")
