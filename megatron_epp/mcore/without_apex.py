"""What Megatron needs where NVIDIA Apex is not installed, on a GPU as on a CPU.

Megatron's defaults choose kernels that only Apex brings. These patches choose what torch has instead, and say so.
"""

import copy
import functools
import importlib.util
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_epp.mcore.patching import Patch

logger = logging.getLogger(__name__)

# Extension modules that Apex builds, and the Megatron argument that makes it import them.
_KERNELS = (
    ("fused_weight_gradient_mlp_cuda", "gradient_accumulation_fusion"),
    ("scaled_masked_softmax_cuda", "masked_softmax_fusion"),
)


def patches() -> tuple[Patch, ...]:
    """The patches this environment needs; none where Apex is installed with its extensions."""
    missing = [argument for module, argument in _KERNELS if importlib.util.find_spec(module) is None]
    needed = []
    if missing:
        needed.append(
            Patch(
                "megatron.training.arguments:validate_args",
                functools.partial(_without_kernels, missing),
                "kernels of NVIDIA Apex are not asked for where it is not installed",
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
    return tuple(needed)


def _without_kernels(missing: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
        off = [name for name in missing if getattr(args, name, False)]
        for name in off:
            setattr(args, name, False)
        if off and os.environ.get("RANK", "0") == "0":
            logger.warning("NVIDIA Apex is not installed: without %s", ", ".join(off))
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
