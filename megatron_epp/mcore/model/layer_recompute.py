"""Recompute of parts of a layer's forward in the backward, in the modes that a chunk's plan names (`plan.recompute.MODES`).

Megatron's `checkpoint`, which restores random states, is around the layer if the projections of attention run again; the output
of core attention is kept unless that runs again too. Else it is around the MLP or experts, with their norm and residual, and
the output of a separate input norm is discarded. Hybrid models have layers of one part: one without attention recomputes in
full in `selective` mode, and one without an MLP keeps all but the norm's output in `mlp` mode.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_epp.mcore.arguments.layout import recipe
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.replaced import attached, put
from megatron_epp.mcore.patches.running_chunk import keep_chunk
from megatron_epp.plan import EppError
from megatron_epp.plan.recompute import CORE_ATTENTION, MLP, MODES, NORMS, PROJECTIONS
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput, Discarded, ReceiveLeaf


def recompute_by_mode(layers: Iterable[torch.nn.Module]) -> None:
    """Make a stage's layers, if they do not yet, recompute by `Recompute.mode` of the chunk that they run.

    Raises `EppError` if a mode runs other parts again than a layer can: all, all but core attention, or MLP and norms.
    """
    for mode in MODES.values():
        if mode.runs_again - {CORE_ATTENTION} not in ({NORMS, PROJECTIONS, MLP}, {NORMS, MLP}):
            raise EppError(f"recompute mode {mode.name}: layers cannot run only {', '.join(sorted(mode.runs_again))} again")
    for number, layer in enumerate(layers):
        if not getattr(layer, "recomputes_by_mode", False):
            _Layer(number, layer)


class _Running(threading.local):
    """Parts that run again in the backward of the layer that a thread runs (actions of a step have a thread each), and its
    norm's output until attention has read it.
    """

    def __init__(self) -> None:
        self.parts: frozenset[str] = frozenset()
        self.normed: Discarded | None = None


_PARTS = ("input_layernorm", "self_attention"), ("norm", "mixer")
"""Names of a layer's first norm and of what mixes tokens behind it, in a transformer layer and in a Mamba layer."""


class _Layer:
    def __init__(self, number: int, layer: Any) -> None:
        self.number, self._in_fp8 = number, bool(recipe(getattr(layer, "config", None)))
        norm_name, mixer_name = next(names for names in _PARTS if hasattr(layer, names[0]))
        norm, mlp = getattr(layer, norm_name), getattr(layer, "mlp", None)
        self._run, self._run_norm = layer.forward, norm.forward
        self._now = _Running()
        layer.recomputes_by_mode = True
        put(layer, "forward", self._forward)
        if mlp is not None and not isinstance(mlp, IdentityOp):
            self._run_mlp = layer._forward_mlp
            put(layer, "_forward_mlp", self._forward_mlp)
        if not isinstance(norm, IdentityOp):
            put(norm, "forward", functools.partial(self._norm, norm))
            getattr(layer, mixer_name).register_forward_hook(self._attended)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        params = kwargs.get("packed_seq_params")
        if not isinstance(params, ChunkParams) or not torch.is_grad_enabled():  # without gradients nothing is kept
            return self._run(*args, **kwargs)
        mode = params.context.recompute.mode(self.number)
        parts = MODES[mode].runs_again if mode else frozenset()
        if PROJECTIONS not in parts:
            self._now.parts = parts
            try:
                return self._run(*args, **kwargs)
            finally:
                self._now.parts, self._now.normed = frozenset(), None
        if CORE_ATTENTION not in parts:
            kwargs["packed_seq_params"] = own = copy.copy(params)
            own.context = replace(params.context, attention_output=CachedAttentionOutput())
        return run_again(self._run, args, kwargs, self._in_fp8)

    def _forward_mlp(self, *args: Any, **kwargs: Any) -> Any:
        if MLP not in self._now.parts:
            return self._run_mlp(*args, **kwargs)
        return run_again(self._run_mlp, args, kwargs, self._in_fp8)

    def _norm(self, norm: torch.nn.Module, x: Tensor) -> Tensor:
        output = self._run_norm(x)
        # A fused norm returns the residual too; and a hook may keep the output, or change it.
        if NORMS in self._now.parts and isinstance(output, Tensor) and not any(attached(norm)):
            self._now.normed = Discarded(self._run_norm, x, output)
        return output

    def _attended(self, _: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        if (normed := self._now.normed) is not None:
            normed.until(output[0])
            self._now.normed = None


def begin_graphs(model: torch.nn.Module) -> None:
    """Have every block of layers begin with hidden states that require a gradient, if it trains anything or runs a chunk.

    Below adapters the embedding does not train. A layer that recomputes would then give its parameters no gradient, since
    autograd sees a function whose inputs require none, and slices' keys and values are freed by attention's backward.
    """
    for module in model.modules():
        is_block = isinstance(getattr(module, "layers", None), torch.nn.ModuleList)
        if is_block and _with_gradient not in module._forward_pre_hooks.values():  # of another run of the model
            module.register_forward_pre_hook(_with_gradient, with_kwargs=True)


def _with_gradient(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hidden = kwargs.get("hidden_states", args[0] if args else None)
    if not (torch.is_grad_enabled() and isinstance(hidden, Tensor) and hidden.is_floating_point()) or hidden.requires_grad:
        return None
    runs_chunk = isinstance(kwargs.get("packed_seq_params"), ChunkParams)
    if not (runs_chunk or any(parameter.requires_grad for parameter in block.parameters())):
        return None  # a frozen tower needs no backward
    entered = ReceiveLeaf().enter(hidden)
    return (args, kwargs | {"hidden_states": entered}) if "hidden_states" in kwargs else ((entered, *args[1:]), kwargs)


def run_again(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], in_fp8: bool = False) -> Any:
    """Run a function now, and once more in the backward. Tensor arguments are saved through autograd.

    With `in_fp8`, what runs again is cast to FP8 as the first time, though the backward is outside of that context.
    """
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    others = {name: value for name, value in kwargs.items() if name not in names}
    num_args = len(args)

    def call(*values: Any) -> Any:  # holds no tensor: autograd does
        return run(*values[:num_args], **others, **dict(zip(names, values[num_args:], strict=True)))

    tensors = *args, *(kwargs[name] for name in names)
    if in_fp8:  # as Megatron's blocks recompute then: weights are cast once for both runs, and by the recipe of the first
        own = False, get_cuda_rng_tracker, get_tensor_model_parallel_group()
        return keep_chunk(te_checkpoint, call, *own, *tensors)
    # Re-entrant: random states are saved for each call, so backwards may run in any order. False: with Megatron's distribution
    # over tensor-parallel ranks the first argument would change in place, and others may hold it.
    return checkpoint(call, False, *tensors)
