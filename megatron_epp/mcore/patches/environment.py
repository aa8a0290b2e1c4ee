"""Patches for machines without NVIDIA Apex or Transformer Engine, with or without `--epp`, and with or without a GPU.

Torch's counterparts take the place of the kernels that only these provide. Transformer Engine's layers fuse weight gradients by
themselves; without Apex only Megatron's own layers do not.
"""

import copy
import functools
import importlib.util
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_epp.mcore.patches.patching import Patch, wrapping

logger = logging.getLogger(__name__)

_FUSION, _FUSED = "gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda"
_KERNELS = (
    ("transformer_impl", "transformer_engine", "transformer_engine", "local"),
    (_FUSION, _FUSED, True, False),
    ("masked_softmax_fusion", "scaled_masked_softmax_cuda", True, False),
    ("apply_rope_fusion", "transformer_engine", True, False),
)
"""Megatron's arguments that by default ask for Transformer Engine or extensions of Apex, the module that each needs, the value
that needs it, and the value without it."""
_OWN_LAYERS = ("ColumnParallelLinear", "RowParallelLinear")
"""Megatron's own linear layers, such as the output layer, which add weight gradients with Apex only."""


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Return the patches that this installation needs."""
    needed = []
    if _missing():
        # Their defaults ask for kernels: attention or a layer would fail at an import or an assertion in its first run.
        needed.append(wrapping("megatron.training.arguments:validate_args", _without_kernels))
    if _FUSED in _missing():
        # Where Transformer Engine's layers fuse, the flag stays; the output layer, which is Megatron's own, raises for it.
        layers = "megatron.core.tensor_parallel.layers"
        needed += [wrapping(f"{layers}:{kind}.__init__", _without_fusion) for kind in _OWN_LAYERS]
    if importlib.util.find_spec("apex") is None:
        # It asserts that there is neither sequence parallelism nor a persistent kernel, which is Megatron's default.
        needed.append(wrapping("megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__", _with_sequence_parallelism))
    if not any(importlib.util.find_spec(package) for package in ("apex", "transformer_engine")):
        # Megatron has one step for all parameters, and torch's Adam one for each. Without these no checkpoint is loaded (there
        # is no step to read yet, or its format has none), or Adam counts a step for every parameter that shares the tensor.
        optimizer = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
        needed += [
            wrapping(f"{optimizer}.state_dict", _with_initial_state),
            wrapping(f"{optimizer}.load_state_dict", _with_own_steps),
            wrapping(f"{optimizer}._set_main_param_and_optimizer_states", _leaving_the_step),
        ]
    return tuple(needed)


@functools.cache
def _missing() -> frozenset[str]:
    return frozenset(module for _, module, _, _ in _KERNELS if importlib.util.find_spec(module) is None)


def ask_for_installed(args: Namespace) -> None:
    """Change flags that ask for kernels which are not installed, and name them in one warning.

    Layers of the script's own (``--spec``) are left to it, and so is ``transformer_impl`` then. Transformer Engine's layers add
    weight gradients without Apex.
    """
    changed = []
    for name, module, needs, instead in _KERNELS:
        is_own = name == "transformer_impl" and getattr(args, "spec", None) is not None
        fuses = name == _FUSION and _is_of_engine(args)
        if module in _missing() and getattr(args, name, None) == needs and not is_own and not fuses:
            setattr(args, name, instead)
            changed.append(f"{name} ({instead})" if instead else name)
    if changed and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "NVIDIA Apex or Transformer Engine is not installed, so torch's counterparts run: changed are %s",
            ", ".join(changed),
        )


def _without_kernels(original: Callable[..., Any], args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Ask for no kernels that are not installed."""
    ask_for_installed(args)
    return original(args, *rest, **kwargs)


def _is_of_engine(args: Namespace) -> bool:
    """True if layers are Transformer Engine's, and no gradients are deferred, which Megatron adds only with Apex."""
    is_used = getattr(args, "transformer_impl", None) == "transformer_engine"
    is_deferred = getattr(args, "defer_embedding_wgrad_compute", False)
    return is_used and not is_deferred and importlib.util.find_spec("transformer_engine") is not None


def _without_fusion(original: Callable[..., Any], self: Any, *args: Any, config: Any, **kwargs: Any) -> None:
    """Make one of Megatron's own layers for a config that asks for fused weight gradients, without them."""
    if not getattr(config, _FUSION, False):
        original(self, *args, config=config, **kwargs)
        return
    plain = copy.copy(config)
    setattr(plain, _FUSION, False)
    original(self, *args, config=plain, **kwargs)
    self.config = config


def _with_sequence_parallelism(original: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Let torch's norms work under sequence parallelism.

    Megatron's assertions are about a mark and a kernel choice; the norm itself only sees its own tokens.
    """
    plain = copy.copy(config)
    plain.persist_layer_norm = plain.sequence_parallel = False
    norm = original(cls, plain, *args, **kwargs)
    for parameter in norm.parameters():
        # Megatron sums gradients marked so over the tensor-parallel group.
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _with_initial_state(original: Callable[..., Any], self: Any) -> Any:
    """Give a new torch optimizer a state with a step to read: loading asks for it before the first step."""
    if not self.optimizer.state:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                tensors = {key: torch.zeros_like(parameter) for key in self.optimizer_state_keys}
                self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **tensors}
    return original(self)


def _with_own_steps(original: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> None:
    """Give every parameter a step of its own, in place of one and the same tensor."""
    original(self, state_dict)
    for state in self.optimizer.state.values():
        state["step"] = state["step"].clone()


@torch.no_grad()  # it copies into views of parameters
def _leaving_the_step(original: Callable[..., Any], self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
    """Leave the step as `load_state_dict` has set it: some checkpoint formats bring none here, and others a zero."""
    original(self, model_param, {**tensors, "step": None})
