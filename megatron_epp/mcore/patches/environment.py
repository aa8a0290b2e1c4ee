"""Patches of every run, and for machines without NVIDIA Apex or Transformer Engine, with or without `--epp` and a GPU.

Processes that a rank starts end with it, and dataset helpers that are compiled already are not compiled anew. Without Apex or
Transformer Engine torch's counterparts run; layers of the latter fuse weight gradients by themselves, Megatron's own do not.
"""

import copy
import functools
import importlib.util
import logging
import os
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from megatron_epp.launch.lifetime import run_until_parent_ends
from megatron_epp.mcore.patches.patching import Patch, wrapping

_HELPERS = "megatron.core.datasets.helpers_cpp"  # Megatron's compiled dataset helpers
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
def of_every_run() -> tuple[Patch, ...]:
    # The one runs `make`, and ends the process where that fails; `multiprocessing` ends processes only where the rank exits by
    # itself, and those of one that is killed would stay.
    has, start = "the compiled helpers are there already", wrapping("multiprocessing.process:BaseProcess.start", _start_ending)
    target = "megatron.core.datasets.utils:compile_helpers"
    return (Patch(target, lambda: None, has), start) if _has_dataset_helpers() else (start,)


def _has_dataset_helpers() -> bool:
    """True if Megatron's dataset helpers are compiled already. If only another Megatron on the path has them, load those.

    The wheel ships them without a Makefile. A fresh clone has a Makefile that needs pybind11 and a compiler; where a wheel is
    installed as well, its helpers serve the clone.
    """
    from megatron.core.datasets import utils

    if importlib.util.find_spec(_HELPERS) is not None:
        return not (Path(utils.__file__).parent / "Makefile").exists()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        for path in Path(folder, "megatron/core/datasets").glob(f"helpers_cpp{suffix}"):
            spec = importlib.util.spec_from_file_location(_HELPERS, path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[_HELPERS] = module
                return True
    return False


def _start_ending(original: Callable[[BaseProcess], None], self: BaseProcess) -> None:
    """Let processes of checkpoint writers and data loaders end with the rank that started them, even if it is killed."""
    if (target := getattr(self, "_target", None)) is not None:
        self._target = functools.partial(run_until_parent_ends, target)  # type: ignore[attr-defined]
    original(self)


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
    """Change flags that ask for kernels which are not installed, and name them once; not for layers of ``--spec``."""
    changed = []
    # Transformer Engine's layers, unless gradients are deferred, which Megatron adds only with Apex
    is_of_engine = getattr(args, "transformer_impl", None) == "transformer_engine"
    is_of_engine &= not getattr(args, "defer_embedding_wgrad_compute", False)
    is_of_engine &= importlib.util.find_spec("transformer_engine") is not None
    for name, module, needs, instead in _KERNELS:
        is_own = name == "transformer_impl" and getattr(args, "spec", None) is not None
        fuses = name == _FUSION and is_of_engine
        if module in _missing() and getattr(args, name, None) == needs and not is_own and not fuses:
            setattr(args, name, instead)
            changed.append(f"{name} ({instead})" if instead else name)
    if changed and os.environ.get("RANK", "0") == "0":
        why = "NVIDIA Apex or Transformer Engine is not installed, so torch's counterparts run"
        logger.warning("%s: changed are %s", why, ", ".join(changed))


def _without_kernels(original: Callable[..., Any], args: Namespace, *rest: Any, **kwargs: Any) -> Any:
    """Ask for no kernels that are not installed."""
    ask_for_installed(args)
    return original(args, *rest, **kwargs)


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
