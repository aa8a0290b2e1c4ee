"""Arguments of the schedule that forward steps need, and the check of what a caller's loss returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from megatron_epp.plan import EppError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Arguments of a call of the schedule that its forward steps need, named as there.

    Attributes:
        forward_step_func: the caller's forward step.
        num_microbatches: by which two-part losses are divided.
        forward_only: no backward follows.
        collect_non_loss_data: the loss function returns data of any kind.
        first_val_step: the first step of an evaluation; None for training.
        context_ranks: number of context-parallel ranks, by which two-part losses are multiplied.
    """

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_ranks: int


def checked_step(call: Call, index: int) -> Callable[..., Any]:
    """Return the caller's forward step of microbatch `index`, whose loss raises `EppError` for what Megatron cannot use.

    Megatron takes a loss with its report, and a number of tokens between them where one is given.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_function = call.forward_step_func(*args, **kwargs)
        if loss_function is None or call.collect_non_loss_data:
            return output, loss_function
        return output, partial(_checked_loss, call, index, loss_function)

    return step


def _checked_loss(call: Call, index: int, loss_function: Callable[..., Any], output: Any) -> Any:
    found = loss_function(output)
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        got = f"{len(found)} values" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
        raise EppError(
            f"the loss function of microbatch {index} returned {got}: a plan needs (loss, report) or (loss, num_tokens, report)"
        )
    loss = found[0]
    if not call.forward_only and not (isinstance(loss, Tensor) and loss.numel() == 1):
        got = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        raise EppError(f"the loss of microbatch {index} is {got}, not a tensor of one number, so there is no gradient of it")
    return found
