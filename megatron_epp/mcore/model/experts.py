"""Auxiliary losses of mixture-of-experts routers, which balance the load of experts, under plans."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor


def scale_router_losses(config: Any, output: Tensor) -> None:
    """Set the scale of the routers' losses to that of the main loss, as Megatron's schedules do after every forward.

    A router weights its loss by its number of tokens, so chunks of unequal length count by their tokens, and the final division
    by all tokens of the batch gives a mean.
    """
    if config.num_moe_experts is None:
        return
    of_experts = getattr(config, "moe_grad_scale_func", None)
    scale: Any = 1.0
    if of_experts is not None:
        scale = of_experts()
    elif config.grad_scale_func is not None:
        scale = config.grad_scale_func(torch.ones(1, device=output.device))
    MoEAuxLossAutoScaler.set_loss_scale(torch.as_tensor(scale, dtype=torch.float32, device=output.device).reshape(1))


def average_router_losses(num_microbatches: int, num_chunks: int) -> None:
    """Rescale the logged router losses to means over chunks, since Megatron's log divides their sums by `num_microbatches`."""
    for values in logged_router_losses().values():
        values *= num_microbatches / num_chunks


def logged_router_losses() -> dict[str, Tensor]:
    """Return the sums that routers keep for the log: for each kind of loss, one sum per layer."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # which came with 0.18
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}
    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
