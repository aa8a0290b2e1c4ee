"""Multi-head latent attention, whose slices hand on keys and values, or with `--epp-latents on` latents, of which core
attention makes keys and values (`runtime.attention.latents`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor
from torch.nn import functional

from megatron_epp.mcore.model.block_loss import all_tokens
from megatron_epp.mcore.model.replaced import AFTER, BEFORE, put
from megatron_epp.runtime.attention.latents import latent_attention


def adopt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Have every latent attention of a model chunk give its core attention latents in place of keys and values.

    Data parallelism and split weight gradients come later: their hooks depend on where a weight gets its gradient.
    """
    if args.epp_latents != "on":
        return
    for module in model.modules():
        if isinstance(module, MultiLatentAttention):
            linear: Any = module.linear_kv_up_proj
            # Called as a module all the same: with --overlap-param-gather its hook waits for the weight.
            put(linear, "forward", functools.partial(_latents, linear), (BEFORE,), wraps=False)
            linear.is_expansion = True
            if hasattr(linear.weight, "skip_backward_post_hook"):  # of a layer that would delay its weight's gradient
                del linear.weight.skip_backward_post_hook
            put(module.core_attention, "attend", functools.partial(_attend, module), (AFTER,))  # it gets no keys and values
            tensors = functools.partial(_tensors, module, module.get_query_key_value_tensors)
            put(module, "get_query_key_value_tensors", tensors, wraps=False)


def _attend(module: Any, query: Tensor, cached: tuple[Tensor, Tensor], *options: Any) -> Tensor:
    expansion = module.linear_kv_up_proj.weight.unflatten(0, (module.num_attention_heads_per_partition, -1))
    return latent_attention(query, *cached, expansion, *options)


def _latents(linear: Any, latent: Tensor) -> tuple[Tensor, None]:
    """Return the latents of all tokens, ``[tokens, rank]``. Their gradient, of this rank's heads, is summed over ranks."""
    return all_tokens(_normed(linear, latent), linear.sequence_parallel, linear.tp_group), None


def _normed(linear: Any, x: Tensor) -> Tensor:
    weight = getattr(linear, "layer_norm_weight", None)
    if weight is None:
        return x
    if linear.zero_centered_gamma:
        weight = weight + 1
    if linear.normalization == "RMSNorm":
        return functional.rms_norm(x, weight.shape, weight, linear.eps)
    return functional.layer_norm(x, weight.shape, weight, linear.layer_norm_bias, linear.eps)


def _tensors(module: Any, original: Callable[..., tuple[Any, ...]], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return queries, latents ``[tokens, 1, rank]``, rotated channels ``[tokens, 1, rotated]``, and what else Megatron returns.

    Megatron's method runs on a view of the module with other attributes, since the module may run in another thread, too.
    """
    view, latents, config = object.__new__(type(module)), list[Tensor](), module.config
    view.__dict__ |= module.__dict__

    def one_head(latent: Tensor) -> tuple[Tensor, None]:
        """Keep the latents, and return keys and values of one head, all zero, for Megatron adds the rotated channels behind the
        key of every head.
        """
        latents.append(module.linear_kv_up_proj(latent)[0])
        view.num_attention_heads_per_partition = 1
        return latents[0].new_zeros(len(latents[0]), config.qk_head_dim + config.v_head_dim), None

    view.__dict__["_modules"] = {**module._modules, "linear_kv_up_proj": one_head}
    query, key, _, *rest = original.__func__(view, *args, **kwargs)  # type: ignore[attr-defined]
    return query, latents[0].unsqueeze(1), key[..., config.qk_head_dim :], *rest
