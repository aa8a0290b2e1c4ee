"""Replacements for CUDA on machines without a GPU, so that Megatron's own training loop runs on any machine.

`activate()` does nothing on a machine with a GPU. Elsewhere it replaces, for this process, the few things Megatron asks
of CUDA. A comment explains each replacement below. `torch.cuda.is_available()` still returns the true answer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from megatron_epp.mcore.patches.patching import Patch, wrapping
from megatron_epp.plan.attributes import having

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_active = False


def activate() -> bool:
    """Replace functions of torch if this machine has no GPU. Returns True if they are replaced.

    Call it before megatron is imported, and apply `patches()` afterwards.
    """
    global _active
    if torch.cuda.is_available():
        return False
    if not _active:
        _stand_in_for_torch_cuda()
        _stand_in_for_device_arguments()
        _stand_in_for_compilation()
        _active = True
        if os.environ.get("RANK", "0") == "0":
            logger.warning("no GPU found: Megatron runs on the CPU with gloo (slow; for development and tests)")
    return True


# ---- torch.cuda ------------------------------------------------------------------------------------------------------


class _Stream:
    """Stream that does nothing, because the CPU executes everything in program order."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        """Return at once, as an event would: everything before it has completed."""


def _nothing() -> Callable[..., None]:
    # A new function each time: torch's compiler refuses one object under two names.
    return lambda *args, **kwargs: None


def _stand_in_for_torch_cuda() -> None:
    cuda: Any = torch.cuda
    # Megatron writes `device=torch.cuda.current_device()` for most of what it allocates.
    cuda.current_device = lambda: _CPU
    cuda.set_device = _nothing()
    cuda.synchronize = _nothing()
    cuda.Stream = _Stream
    cuda.current_stream = _Stream
    cuda.stream = contextlib.nullcontext
    # The CPU generator stands in for the CUDA one. torch only queues CUDA seeding until a device appears, silently.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    # So dropout moves the CPU generator, which Megatron takes for a mistake and warns about in every layer.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state" not in record.getMessage()
    )


# ---- device="cuda" ---------------------------------------------------------------------------------------------------

_FACTORIES = ("empty", "empty_like", "ones", "tensor", "zeros")  # which Megatron calls with device="cuda"


def _on_cpu(factory: Callable[..., torch.Tensor], *, follows_default: bool) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = kwargs.get("device")
        if asked is None and follows_default:
            # Of `with torch.device(...)` or `torch.set_default_device`. `torch.get_default_device` itself makes tensors.
            modes = _get_current_function_mode_stack()
            asked = next((mode.device for mode in modes if isinstance(mode, _device.DeviceContext)), None)
        if isinstance(asked, str | torch.device) and str(asked).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # for copies to a device; it needs CUDA's driver
        return factory(*args, **kwargs)

    return create


def _stand_in_for_device_arguments() -> None:
    # A context or default device acts on functions that torch collects when it is first asked: these must be torch's own.
    constructors = _device._device_constructors()
    for name in _FACTORIES:
        factory = getattr(torch, name)
        setattr(torch, name, _on_cpu(factory, follows_default=factory in constructors))
    tensors: Any = torch.Tensor
    modules: Any = torch.nn.Module
    tensors.cuda = modules.cuda = lambda self, *args, **kwargs: self
    original_type = tensors.type

    def type_as_megatron_expects(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Optimizers and gradient clipping compare `param.type()` with the string "torch.cuda.FloatTensor".
        answer = original_type(self, *args, **kwargs)
        if isinstance(answer, str) and self.is_cpu and _called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    tensors.type = type_as_megatron_expects


def _called_by_megatron() -> bool:
    """True if the caller of this function was itself called from a megatron module."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _stand_in_for_compilation() -> None:
    # Megatron decorates its fused functions with torch.compile: on a CPU that means a C++ compiler run per shape.
    original = torch.compile

    def compile_unless_megatron(model: Any = None, **kwargs: Any) -> Any:
        if not _called_by_megatron():
            return original(model, **kwargs)
        return model if model is not None else lambda function: function

    torch.compile = compile_unless_megatron


# ---- inside megatron -------------------------------------------------------------------------------------------------


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Return the patches of Megatron itself, for machines without a GPU, where this also calls `activate`."""
    activate()
    return (
        Patch(
            "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
            lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
            "torch queues it until a device appears: dropout and recomputation would never restore their state",
        ),
        wrapping("megatron.training.arguments:validate_args", _with_gloo),
        wrapping("megatron.training.initialize:initialize_megatron", _initialize_without_cuda),
        Patch("megatron.training.initialize:set_jit_fusion_options", _nothing(), "warms up kernels that do not exist here"),
        Patch("megatron.training.utils:get_device_arch_version", lambda: 10, "asks for a variable of CUDA's on older GPUs"),
        wrapping("megatron.training.training:build_train_valid_test_data_iterators", _leaving_the_generator),
        Patch(
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            lambda tensor, as_numpy=False, record_stream=False: tensor.numpy() if as_numpy and tensor is not None else tensor,
            "leaves split sizes that are on the CPU already as tensors, which collectives do not take",
        ),
        wrapping("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics", _averaging_by_sums),
    )


def _averaging_by_sums(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Average over ranks by a sum and a division, since gloo cannot average."""
    dist: Any = torch.distributed
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **rest: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return reduce(tensor, op=op, group=group, **rest)
        done = reduce(tensor, op=dist.ReduceOp.SUM, group=group, **rest)
        tensor /= dist.get_world_size(group)
        return done

    with having(dist, all_reduce=all_reduce):
        return original(*args, **kwargs)


def _leaving_the_generator(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Restore the CPU generator afterwards, which stands in for the CUDA one: data loaders draw seeds from it.

    A resumed run restores the generator before this and would go on with another dropout than the one it continues.
    """
    with torch.random.fork_rng(devices=[]):
        return original(*args, **kwargs)


def _with_gloo(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    """Use gloo, since there is no NCCL on a CPU."""
    args.distributed_backend = "gloo"
    return original(args, *rest, **kwargs)


def _initialize_without_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ask for no CUDA, and count a device per process: without one, groups and seeds are skipped."""
    with having(torch.cuda, device_count=lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        return original(*args, **{**kwargs, "allow_no_cuda": True})
