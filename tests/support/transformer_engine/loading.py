"""Imports Transformer Engine's Python from a folder, with `extension` in the place of its compiled functions."""

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

from megatron_epp.mcore import cpu
from tests.support.transformer_engine import extension

PACKAGE = "transformer_engine"
_ENVIRONMENT = {
    "NVTE_PROJECT_BUILDING": "1",  # or it looks for CUDA's libraries when it is imported
    "NVTE_TORCH_COMPILE": "0",  # of its fused functions, by a C++ compiler
}
_DEVICE = types.SimpleNamespace(major=9, minor=0, name="none", multi_processor_count=132, total_memory=80 << 30)


def load(folder: Path) -> None:
    """Import Transformer Engine from a folder.

    Call it after `megatron_epp.mcore.cpu.activate`, before Megatron is imported, which then finds it.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    if not (folder / PACKAGE).is_dir():
        raise ModuleNotFoundError(f"no {PACKAGE} in {folder}: bash scripts/te.sh installs it")
    os.environ |= _ENVIRONMENT
    sys.path.insert(0, str(folder))
    sys.modules[extension.NAME] = extension.module_of(folder / PACKAGE, metadata.version("transformer-engine"))
    for name in ("onnx", "onnxscript"):  # for exports, which no training makes
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))
    _pretend_a_gpu()
    with _without_init(folder):
        import transformer_engine.common as common
    common.load_framework_extension = lambda framework: None  # it is there
    import transformer_engine

    transformer_engine.common = common
    import transformer_engine.pytorch
    from transformer_engine.pytorch import distributed, fp8

    distributed._get_cuda_rng_state = lambda *_, **__: None  # of a GPU
    distributed._set_cuda_rng_state = lambda *_, **__: None
    coalesced = contextlib.nullcontext(types.SimpleNamespace(wait=lambda: None))  # gloo coalesces no exchanges, it runs each
    torch.distributed._coalescing_manager = _answering(torch.distributed._coalescing_manager, coalesced)
    for recipe in ("check_fp8_support", "check_mxfp8_support", "check_fp8_block_scaling_support"):
        for module in (fp8, sys.modules.get(f"{PACKAGE}.pytorch.quantization", fp8)):
            setattr(module, recipe, lambda: (True, ""))


@contextlib.contextmanager
def _without_init(folder: Path) -> Iterator[None]:
    """Have a part of the package imported ahead of the package, which imports all of it."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(folder / PACKAGE)]
    sys.modules[PACKAGE] = package
    try:
        yield
    finally:
        del sys.modules[PACKAGE]


def _asked_by_engine() -> bool:
    """True if the caller of the caller is a function of Transformer Engine."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(f"{PACKAGE}.")


def _answering(original: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """Return a function that answers so where Transformer Engine asks, and as ever where others do."""
    return lambda *args, **kwargs: answer if _asked_by_engine() else original(*args, **kwargs)


def _pretend_a_gpu() -> None:
    """Answer Transformer Engine as a GPU would: it takes no other tensors. Megatron and this package hear the truth."""
    cuda: Any = torch.cuda
    answers = {"is_available": True, "get_device_properties": _DEVICE, "is_current_stream_capturing": False}
    for name, answer in answers.items():
        setattr(cuda, name, _answering(getattr(cuda, name), answer))
    cuda.get_device_capability = lambda *_: (_DEVICE.major, _DEVICE.minor)  # Megatron asks, too: for grouped products
    cuda.device = contextlib.nullcontext
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    is_cuda, tensors = torch.Tensor.is_cuda, torch.Tensor  # type: Any, Any
    tensors.is_cuda = property(lambda tensor: _asked_by_engine() or is_cuda.__get__(tensor))
    for name in ("arange", "full", "rand", "randn"):  # which it calls with device="cuda"
        setattr(torch, name, cpu._on_cpu(getattr(torch, name), follows_default=False))
