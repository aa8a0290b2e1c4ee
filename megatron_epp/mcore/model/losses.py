"""Losses under plans: Megatron's language-model loss summed over tokens, and the auxiliary losses of experts' routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_epp.mcore import releases

if TYPE_CHECKING:
    from megatron_epp.losses import Loss

_INSTEAD_OF_NO_TOKENS = 1e-30
"""Number of tokens that Megatron is given in place of 0. It is lost in rounding as soon as 1 is added to it in fp32."""


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of a microbatch's unmasked losses, which is checked, its tokens (int32), and both as Megatron's report."""
    loss, num_tokens, report = summed_loss(loss_mask, losses)
    check_loss(loss, "this microbatch")
    return loss, num_tokens, report_of(report)


def report_of(summed: Tensor, by: Loss | None = None) -> dict[str, Tensor]:
    """Return a sum of losses and its number of tokens as the report that Megatron adds up over replicas, divides and logs.

    A loss of the user's, `by`, has further sums to log, which are divided likewise. In place of 0 tokens, whose loss would be
    NaN, the report has `_INSTEAD_OF_NO_TOKENS`, which changes no sum that includes a trained token.
    """
    loss, num_tokens, *more = summed.unbind()
    names = ("lm loss",) if by is None else (by.name, *by.logged)
    number = num_tokens.clamp(min=_INSTEAD_OF_NO_TOKENS)
    return {name: torch.stack([value, number]) for name, value in zip(names, (loss, *more), strict=True)}


def summed_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `token_loss`, unchecked: the sum, the number of tokens, and both in one detached tensor."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)  # a sum, as for per-token losses: chunks of any length add up
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, torch.stack([loss.detach(), num_tokens.to(loss.dtype)])


def check_loss(loss: Tensor, whose: str) -> None:
    """Wait for a loss, and report NaN or infinity to Megatron's rerun machine, which ends the run or retries it."""
    if releases.checks_losses():
        machine = get_rerun_state_machine()
        for rejection, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=rejection,
                message=f"found {name} in the loss of {whose}",
                tolerance=0.0,
                fatal=True,
            )


def scale_added_losses(config: Any, output: Tensor) -> None:
    """Set the scale of the losses of routers and multi-token prediction to the main loss's, as Megatron does after a forward.

    A router weights its loss by its number of tokens, so chunks of unequal length count by their tokens, and the final division
    by all tokens of the batch gives a mean.
    """
    if config.num_moe_experts is None and not config.mtp_num_layers:
        return
    # Without Megatron's division by microbatches: plans need --calculate-per-token-loss, which divides gradients by tokens.
    scale = 1.0 if config.grad_scale_func is None else config.grad_scale_func(torch.ones(1, device=output.device))
    if config.num_moe_experts is not None:
        of_experts = releases.router_loss_scale(config)
        MoEAuxLossAutoScaler.set_loss_scale(_on_device(scale if of_experts is None else of_experts(), output))
    if config.mtp_num_layers:
        MTPLossAutoScaler.set_loss_scale(_on_device(scale, output))


def _on_device(scale: Any, like: Tensor) -> Tensor:
    if not isinstance(scale, Tensor):  # filled on the device: a copy of a number to it would wait for the device
        scale = torch.full((1,), float(scale), device=like.device)
    return scale.to(like.device, torch.float32).reshape(1)


def average_router_losses(num_microbatches: int, num_chunks: int) -> None:
    """Rescale the logged router losses to means over chunks, since Megatron's log divides their sums by `num_microbatches`."""
    for values in releases.logged_router_losses().values():
        values *= num_microbatches / num_chunks
