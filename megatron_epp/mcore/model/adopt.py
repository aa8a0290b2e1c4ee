"""Changes that `--epp` makes to a model while Megatron builds it: our core attention, and rotary angles by position.

They are made in the constructors of Megatron's models, so that they apply whether a config, a `model_provider` or a script of
the user's calls the constructor.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.conflicts import Door
from megatron_epp.mcore.arguments.layout import HYBRID_PATTERNS, placement_of
from megatron_epp.mcore.arguments.refusals import pattern_problem, refuse
from megatron_epp.mcore.arguments.vocabulary import shards_vocabulary
from megatron_epp.mcore.features import bound
from megatron_epp.mcore.model import half_layers, model_chunks
from megatron_epp.mcore.model.core_attention import ChunkParams, RelayAttention
from megatron_epp.mcore.model.kinds import KINDS
from megatron_epp.mcore.model.language_model import axes_of, language_model_of
from megatron_epp.mcore.model.weight_gradients import split_weight_gradients
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.plan import EppError, Remedy
from megatron_epp.plan.placement import Placement
from megatron_epp.runtime.attention import context_parallel
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, ContextParallel

_SPECS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec", "mtp_block_spec")
"""Constructor parameters through which models receive the specs of their layers."""
_MIXERS = ("self_attention", "cross_attention", "mixer")
"""Attributes of Megatron's layers for what mixes tokens."""


def construct(args: argparse.Namespace, original: Callable[..., None], *rest: Any, **named: Any) -> None:
    """Call Megatron's constructor of a model, the first of `rest`, so that it builds a model that plans can run.

    Raises:
        EppError: a core attention is not one of Megatron's, the configuration asks for what slices do not have, or a hybrid
            model's pattern does not have the placement's stages.
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
    layers = model_chunks.cut_layers(args, vp_stage)
    if layers is not None:
        spec, config = call.arguments["transformer_layer_spec"], call.arguments["config"]
        call.arguments["transformer_layer_spec"] = half_layers.cut_spec(spec, config, vp_stage, layers)
    if args.epp_placement != "looped":
        call.arguments |= model_chunks.ends(args, vp_stage)
        if "transformer_layer_spec" not in call.arguments:
            call.arguments |= _placed_hybrid(call.arguments, placement_of(args))
    original(*call.args, **call.kwargs)
    model.cut_layers = layers
    _finish(model, args, vp_stage)


def _placed_hybrid(arguments: Mapping[str, Any], placement: Placement) -> dict[str, Any]:
    """Return the arguments of a hybrid model's constructor that follow the placement: the pattern and the stack's spec."""
    name = next(name for name in HYBRID_PATTERNS if arguments.get(name))
    spec = next(name for name in _SPECS if name in arguments)
    stack = model_chunks.placed_stack(arguments[spec], arguments[name], placement, arguments.get("vp_stage"))
    return {name: model_chunks.placed_pattern(arguments[name], placement), spec: stack}


def check_adopted(model: torch.nn.Module) -> None:
    """Raise `EppError` for a model that was built without our attention."""
    bare = unwrap_model(model)
    if not any(getattr(part, "has_relay", False) for part in (bare, language_model_of(model))):
        raise EppError(f"--epp trains GPTModel and HybridModel; the script builds a {type(bare).__name__}")


def number_attentions(model: torch.nn.Module) -> None:
    """Number the attentions of a model chunk, by which the KV cache keeps their keys and values.

    Raises:
        EppError: a module would mix tokens of different sequences, since only `RelayAttention` keeps a chunk's sequences
            separate; or an attention is in two layers, whose keys and values would meet.
    """
    names: dict[RelayAttention, str] = {}
    repeated = (block for block in model.modules() if getattr(block, "mtp_use_repeated_layer", False))
    shared = [part for block in repeated for part in block.modules() if isinstance(part, RelayAttention)]  # the chunk's last
    adopted = {kind for row in KINDS for kind in row.modules()}
    inside = {part for module in model.modules() if type(module) in adopted for part in module.modules()}
    for name, module in model.named_modules(remove_duplicate=False):  # so that an attention in two layers is seen twice
        if isinstance(module, RelayAttention):
            if module in names:
                raise EppError(
                    f"{names[module]} and {name} are one attention in two layers, by which plans keep the keys and values of "
                    "slices: one layer's would take the place of the other's; give each layer an attention of its own"
                )
            module.number = len(names)
            names[module] = name
            module.stride = len(shared) * (module in shared)
        elif module not in inside and _mixes_tokens(name, module):
            raise EppError(
                f"{name} ({type(module).__name__}) mixes tokens without the attention of plans: sequences of a chunk would run "
                "into each other there, and slices lose its state; whole microbatches can be planned, neither cut nor packed",
                Remedy("set", "microbatches", "user"),
            )


def _mixes_tokens(name: str, module: torch.nn.Module) -> bool:
    """Return True for a convolution over tokens, and for a module in the place of attention that has no `RelayAttention`."""
    if isinstance(module, torch.nn.Conv1d):
        return module.kernel_size != (1,)
    if name.rpartition(".")[2] not in _MIXERS or isinstance(module, (IdentityOp, torch.nn.Identity)):
        return False
    return not any(isinstance(part, RelayAttention) for part in module.modules())


def _finish(model: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    # All of it before data parallelism wraps the chunk, which makes buffers and hooks for the parameters that it finds.
    number_attentions(model)
    place_rotary(model)
    for kind in KINDS:
        kind.adopt(model, args)
    if args.epp_loss is not None:
        resolve_name("megatron_epp.mcore.model.value_head:put_head")(model, args)
    if shards_vocabulary(args):
        resolve_name("megatron_epp.mcore.model.vocabulary_shard:divide_output_layer")(model, args, vp_stage)
    elif args.epp_placement != "looped":
        model_chunks.tie(model, args)
    if args.epp_split_weight_gradient and args.epp_schedule == "elastic":
        split_weight_gradients(model)
    model.has_relay = True


def place_rotary(model: Any) -> None:
    """Have the model, and each latent attention, turn by the positions of a chunk's tokens; all of the latter share a table."""
    # Angles by several axes are of the positions that the model gets.
    rotary = getattr(model, "rotary_pos_emb", None) if axes_of(model) == 1 else None
    latents = [module for module in model.modules() if isinstance(module, MultiLatentAttention)]
    if rotary is None and not latents:
        return
    group = context_parallel.of_group(mpu.get_context_parallel_group())
    if rotary is not None:
        model.rotary_pos_emb = PositionedRotary(rotary, group)
    shared = PositionedRotary(latents[0].rotary_pos_emb, group, by_row=False) if latents else None
    for module in latents:
        module.rotary_pos_emb = shared


def relayed(spec: Any) -> Any:
    """Return a copy of a layer, block or stack spec in which every core attention is `RelayAttention`.

    It depends on the structure, not on the kind of model: every `core_attention` of a dataclass of submodules is replaced.
    Raises `EppError` if one is not Megatron's.
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


TABLE_TOKENS = 1 << 14
"""Positions whose angles are kept, 8 MiB for 128 channels; slices of longer sequences compute theirs. Not measured."""


class PositionedRotary(torch.nn.Module):
    """Wrapper of a model's rotary embedding that returns the angles of a chunk's own positions on this context-parallel rank.

    A slice starts at its offset in the sequence, a packed sequence at zero. Megatron calls it in two steps:
    `get_rotary_seq_len` gets the packed-sequence parameters, and `forward` gets its result.

    Args:
        context_parallel: how ranks share the chunk's tokens.
        by_row: queries have a dimension for rows of a batch, which latent attention leaves out.
    """

    def __init__(self, rotary: Any, context_parallel: ContextParallel = NOT_SHARED, by_row: bool = True) -> None:
        super().__init__()
        self.rotary, self.context_parallel, self.by_row = rotary, context_parallel, by_row
        self._table: tuple[Tensor, tuple[Any, ...]] | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """Return the chunk's parameters in place of a length, for `forward`; without a chunk the wrapped module's length."""
        params = next((a for a in (*args, *kwargs.values()) if isinstance(a, ChunkParams)), None)
        return self.rotary.get_rotary_seq_len(*args, **kwargs) if params is None else params

    def forward(self, length: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the angles of a chunk, ``[tokens / shards, 1, 1, channels]``, and any further result of the wrapped module.

        Without `by_row` they are ``[tokens / shards, 1, channels]``.
        """
        if not isinstance(length, ChunkParams):
            return self.rotary(length, *args, **kwargs)
        table = length.context.table
        pieces = table.part(self.context_parallel.shard(table.num_tokens))
        parts, more = zip(*(self._angles(piece.start, piece.num_tokens) for piece in pieces), strict=True)
        angles = torch.cat(parts) if self.by_row else torch.cat(parts)[:, 0]
        return (angles, *more[0]) if more[0] else angles  # YaRN returns a scale too

    def _angles(self, start: int, length: int) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the angles of some positions, from a table if it reaches that far: no kernel is launched for them then."""
        if start + length > TABLE_TOKENS:
            return self._made(start, length)
        if self._table is None:
            self._table = self._made(0, TABLE_TOKENS)
        angles, more = self._table
        return angles.narrow(0, start, length), more

    def _made(self, start: int, length: int) -> tuple[Tensor, tuple[Any, ...]]:
        make = getattr(self.rotary, "get_emb", None)  # the part of `forward` that keeps no cache of results
        angles = make(length, start) if make is not None else self.rotary(length, start)
        return (angles[0], angles[1:]) if isinstance(angles, tuple) else (angles, ())
