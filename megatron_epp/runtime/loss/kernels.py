"""Selection of the kernel that computes losses and gradients of a block's logits: Liger's where it can be used, or none.

Without it plain torch takes several passes over logits as wide as the vocabulary (`loss.token_blocks`). Liger's kernel reads
them once for losses, and twice for their gradient, which overwrites them. It is verified before it is used, on a few tokens:
its losses must be exact, and its gradient rounded once. The function that wraps it is not called: it rounds losses to the type
of the logits, which would have to be fp32, and the host waits in it for the device three times a block.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MODULE, _KERNEL = "liger_kernel.ops.cross_entropy", "liger_cross_entropy_kernel"
_INSTALL = "pip install 'megatron-epp[liger]'"

_MOST_COLUMNS = 32768
"""Largest number of columns that the kernel keeps in registers at once: more would spill."""

_PROOF_TOKENS = 6  # the four special ones of `errors`, and two ordinary ones
_LOSS_TOLERANCE = 1e-5
"""Largest relative error of a loss, about a hundred roundings in fp32; a loss rounded to bf16 is 4e-3 off."""
_GRADIENT_TOLERANCE = 1.1 * 2**-8
"""Largest relative error of any gradient value: half a unit in the last of bf16's 8 bits, plus a margin."""


class LossCase(NamedTuple):
    """Properties on which the choice depends: `entries` counts this rank's vocabulary, which is a part of it if `is_shared`."""

    device: str
    dtype: torch.dtype
    entries: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class LossKernel:
    """Cross entropy of logits ``[tokens, entries]``, contiguous, with labels ``[tokens]``, each the index of an entry."""

    name: str
    losses: Callable[[Tensor, Tensor], Tensor]  # returns every token's loss, in fp32
    # Overwrites the logits with the gradient of each token's own loss, and returns it
    gradient: Callable[[Tensor, Tensor], Tensor]
    obstacle: Callable[[LossCase], str]  # why it cannot be used for a case here; empty if it can


@functools.cache
def explain(case: LossCase) -> tuple[LossKernel | None, str]:
    """Return the kernel for a case and an empty string, or None and the reason, where plain torch is used.

    Every rank on which a supported kernel fails verification logs a warning.
    """
    obstacle = LIGER.obstacle(case)
    if not obstacle and (obstacle := _failed_verification(LIGER, case)):
        logger.warning("%s is not used here: %s. Losses take more memory, which plans count", LIGER.name, obstacle)
    return (None, f"{LIGER.name}: {obstacle}") if obstacle else (LIGER, "")


def _failed_verification(kernel: LossKernel, case: LossCase) -> str:
    try:
        of_losses, of_gradient = errors(kernel, case)
    except torch.OutOfMemoryError:  # tells nothing of the kernel, which is asked again when there is room
        raise
    except Exception as error:  # libraries raise what they like where a build or a device does not suit them
        return f"it fails ({type(error).__name__}: {error})"
    if not of_losses <= _LOSS_TOLERANCE:
        return f"its losses are {of_losses:.1e} from exact ones, where {_LOSS_TOLERANCE:.0e} may be"
    if not of_gradient <= _GRADIENT_TOLERANCE:
        return f"its gradient is {of_gradient:.1e} from the exact one, where {_GRADIENT_TOLERANCE:.1e} may be"
    return ""


@torch.no_grad()
def errors(kernel: LossKernel, case: LossCase) -> tuple[float, float]:
    """Return the largest relative errors of a kernel's losses and of its gradient's values, on a few tokens.

    Among them are a token whose label is almost certain, so that its gradient there is a small difference, one whose
    exponentials would overflow, and labels that are the first and the last entry.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(_PROOF_TOKENS, case.entries, generator=generator)
    labels = torch.randint(case.entries, (_PROOF_TOKENS,), generator=generator)
    labels[2], labels[3] = 0, case.entries - 1
    logits[0, labels[0]] = logits[0].logsumexp(0) + 7
    logits[1] *= 1000
    logits, labels = logits.to(case.device, case.dtype), labels.to(case.device)
    exact = logits.double()
    log_sum = exact.logsumexp(1, keepdim=True)
    wanted = (log_sum - exact.gather(1, labels[:, None])).squeeze(1)
    gradient = (exact - log_sum).exp()
    gradient.scatter_add_(1, labels[:, None], -torch.ones_like(log_sum))
    of_losses = (kernel.losses(logits.clone(), labels) - wanted).abs() / (1 + wanted)
    of_gradient = (kernel.gradient(logits, labels) - gradient).abs() / gradient.abs().clamp_min(1e-30)
    return float(of_losses.max()), float(of_gradient.max())


def _liger() -> Any:
    return getattr(importlib.import_module(_MODULE), _KERNEL)


def _launch(logits: Tensor, labels: Tensor, has_gradients: bool) -> Tensor:
    """Run Liger's kernel with one program per token; return the losses, ``[tokens]`` in fp32."""
    kernel, losses = _liger(), torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    arguments = _arguments(logits, labels, losses, has_gradients)
    kernel[(len(logits),)](**{name: arguments[name] for name in kernel.arg_names}, num_warps=16 if torch.version.hip else 32)
    return losses


def _arguments(logits: Tensor, labels: Tensor, losses: Tensor, has_gradients: bool) -> dict[str, Any]:
    """Return all arguments that releases of the kernel since 0.6.3 take. Without averaging, counts are not read."""
    entries = logits.shape[1]
    return {
        "X_ptr": logits,
        "X_stride": logits.stride(0),
        "Y_ptr": labels,
        "Y_stride": labels.stride(0),
        "weight_ptr": None,
        "loss_ptr": losses,
        "z_loss_ptr": None,
        "loss_stride": losses.stride(0),
        "token_accuracy_ptr": None,
        "token_accuracy_stride": 0,
        "predicted_tokens_ptr": None,
        "predicted_tokens_stride": 0,
        "n_cols": entries,
        "n_non_ignore": 1,
        "sum_non_ignore_weight": 1,
        "weight_sum": 0.0,
        "ignore_index": -100,
        "lse_square_scale": 0.0,
        "label_smoothing": 0.0,
        "reduction": "none",
        "softcap": None,
        "RETURN_Z_LOSS": False,
        "RETURN_TOKEN_ACCURACY": False,
        "RETURN_PREDICTED_TOKENS": False,
        "BLOCK_SIZE": min(_MOST_COLUMNS, 1 << (entries - 1).bit_length()),
        "HAS_WEIGHT": False,
        "HAS_SOFTCAPPING": False,
        "HAS_GRADIENTS": has_gradients,
    }


def _liger_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    _launch(logits, labels, has_gradients=True)
    return logits


def _obstacle(case: LossCase) -> str:
    if case.device != "cuda":
        return "it runs on GPUs"
    if case.is_shared:
        return "it knows no vocabulary that ranks share"
    if case.dtype == torch.float16:
        return "its gradient, which is scaled later, would leave the range of fp16"
    if case.dtype != torch.bfloat16:
        return "it is for bf16: wider logits take their gradient in place without it"
    try:
        kernel = _liger()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"it cannot be imported ({error}): {_INSTALL}"
    if "HAS_GRADIENTS" not in kernel.arg_names:
        return f"this release is older than 0.6.3, and makes gradients with every loss: {_INSTALL} --upgrade"
    empty = torch.empty(1, 1)
    unknown = [name for name in kernel.arg_names if name not in _arguments(empty, empty, empty, False)]
    return f"this release takes what is not known here: {', '.join(unknown)}" if unknown else ""


LIGER = LossKernel("Liger's cross entropy", functools.partial(_launch, has_gradients=False), _liger_gradient, _obstacle)
