"""Patches for machines without NVIDIA Apex or Transformer Engine, with or without a GPU.

Megatron's defaults choose kernels that only these packages provide. The patches choose torch's counterparts and log it.
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

from megatron_epp.mcore.patches.patching import Patch

logger = logging.getLogger(__name__)

# Megatron arguments that are on by default, and the module each needs: extensions of Apex, or Transformer Engine.
_KERNELS = (
    ("gradient_accumulation_fusion", "fused_weight_gradient_mlp_cuda"),
    ("masked_softmax_fusion", "scaled_masked_softmax_cuda"),
    ("apply_rope_fusion", "transformer_engine"),
)


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Return the patches that this environment needs; none if everything is installed."""
    missing = [argument for argument, module in _KERNELS if importlib.util.find_spec(module) is None]
    needed = []
    if missing:
        needed.append(
            Patch(
                "megatron.training.arguments:validate_args",
                functools.partial(_without_kernels, missing),
                "kernels that are not installed are not asked for",
                wraps=True,
            )
        )
    if importlib.util.find_spec("apex") is None:
        needed.append(
            Patch(
                "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
                _with_sequence_parallelism,
                "torch's norms work under sequence parallelism",
                wraps=True,
            )
        )
    if not any(importlib.util.find_spec(package) for package in ("apex", "transformer_engine")):
        optimizer = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
        needed += [
            Patch(f"{optimizer}.state_dict", _with_initial_state, "a new torch optimizer has no step to read", wraps=True),
            Patch(f"{optimizer}.load_state_dict", _with_own_steps, "torch counts the steps of each parameter", wraps=True),
            Patch(
                f"{optimizer}._set_main_param_and_optimizer_states", _leaving_the_step, "the moments carry no step", wraps=True
            ),
        ]
    return tuple(needed)


def _without_kernels(missing: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        off = [name for name in missing if getattr(args, name, False)]
        for name in off:
            setattr(args, name, False)
        if off and os.environ.get("RANK", "0") == "0":
            logger.warning("NVIDIA Apex or Transformer Engine is not installed: off are %s", ", ".join(off))
        return original(args, *rest, **kwargs)

    return validate_args


def _with_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron's assertions are about a mark and a kernel choice; the norm itself only sees its own tokens.
        plain = copy.copy(config)
        plain.persist_layer_norm = plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums gradients marked so over the tensor-parallel group.
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return new


def _with_initial_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        # Loading asks for the state before the first step, and Megatron takes the step from there.
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    tensors = {key: torch.zeros_like(parameter) for key in self.optimizer_state_keys}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **tensors}
        return original(self)

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        # Megatron gives all parameters one and the same step tensor, which each of them would then advance.
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _leaving_the_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @torch.no_grad()  # it copies into views of parameters
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        # Some checkpoint formats bring no step here and others a zero; load_state_dict has already set it.
        original(self, model_param, {**tensors, "step": None})

    return set_states
