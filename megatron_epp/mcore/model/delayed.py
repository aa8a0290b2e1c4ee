"""Split weight gradients of Transformer Engine's linear layers, delayed until their chunk's W.

With `delay_wgrad_compute` such a layer's backward puts the inputs of the weight gradient into the layer's `wgrad_store`, a
queue; `backward_dw` takes them out, computes the gradient, and calls the hooks that Megatron's data parallelism has registered.
A queue would tie the order of W to that of B, so nothing stays in it: the entry of a backward is kept with its chunk, and put
back right before `backward_dw`. See WeightGradStore and TransformerEngineBaseModule in Transformer Engine, 2.7 to 2.18.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_epp.runtime.autograd.weights import WeightGradients

_OF_A_CHUNK = 2
"""Number of leading items of a store entry that belong to a chunk (input, output's gradient); the rest is the layer's."""


def obstacle(module: Any) -> str:
    """Return the reason why a layer cannot delay its weight's gradient, with a remedy; empty if it can."""
    store = getattr(module, "wgrad_store", None)
    if store is None or not store.delay_wgrad_compute():
        return "it does not put off its weight's gradient: add --transformer-impl local"
    if not _weights(module):
        return "it leaves its weight's gradient to the backward's hooks: use Transformer Engine 2.7 or newer"
    if getattr(module, "use_bias", False):
        return "its bias takes a gradient with every weight's: add --disable-bias-linear (and no --add-qkv-bias)"
    if hasattr(module, "num_gemms") and not module.fuse_wgrad_accumulation:
        return "it would hold a gradient of all experts for every chunk: drop --no-gradient-accumulation-fusion"
    return ""


def take_over(module: Any, gradients: WeightGradients) -> None:
    """Let `gradients` decide when a layer computes its delayed weight gradients."""
    store, weights = module.wgrad_store, _weights(module)
    queue: Callable[[list[Any], Callable[..., Any]], None] = store.put

    def put(entry: list[Any], function: Callable[..., Any]) -> None:
        tensors, shape = tree_flatten(entry[:_OF_A_CHUNK])
        rest = entry[_OF_A_CHUNK:]

        def compute(tensors: Sequence[Tensor]) -> None:
            queue([*tree_unflatten(list(tensors), shape), *rest], function)
            if module.fuse_wgrad_accumulation:
                _stand_in(weights)
            module.backward_dw()

        gradients.put_off(weights[0], tensors, compute)

    store.put = put


def _weights(module: torch.nn.Module) -> list[Tensor]:
    """Return the weights whose gradient hooks wait for `backward_dw`."""
    return [p for p in module.parameters(recurse=False) if getattr(p, "skip_backward_post_hook", False)]


def _stand_in(weights: Sequence[Tensor]) -> None:
    """Give weights a placeholder gradient where they have none.

    Fused kernels add to the main gradient directly, and a backward leaves a placeholder tensor, which the first of several Ws
    consumes; Megatron's hooks require one every time.
    """
    for weight in weights:
        if weight.grad is None:
            weight.grad = weight.new_zeros(()).expand_as(weight)
