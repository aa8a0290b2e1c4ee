"""Gated delta nets (Qwen3-Next, Qwen3.5), whose slices hand on a state and the last rows ahead of their convolution."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.model.kinds import is_delta_net
from megatron_epp.mcore.model.kinds.own_forward import run_chunks
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, of_group
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.gated_delta import DeltaLayer


def adopt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Have delta nets run chunks. Packed sequences run in one call where the kernels take offsets; Megatron would mix them."""
    run_chunks(model, is_delta_net, _forward)


def _forward(net: Any, number: int, hidden_states: Tensor, context: ChunkContext) -> Any:
    projected, _bias = net.in_proj(hidden_states)  # of all tokens that tensor-parallel ranks share
    keys, values, heads = net.qk_dim_local_tp, net.v_dim_local_tp, net.num_v_heads_local_tp
    q, k, v, gate, strength, decay = projected[:, 0].split([keys, keys, values, values, heads, heads], dim=-1)
    q, k = (x.unflatten(1, (-1, net.key_head_dim)) for x in (q, k))
    v, gate = (x.unflatten(1, (-1, net.value_head_dim)) for x in (v, gate))
    shared = of_group(net.pg_collection.cp)
    mix = functools.partial(_layer(net, number, shared), context=context)
    out = shared.attend(mix, q, (k, v, strength[..., None], decay[..., None]))
    return net.out_proj(net._apply_gated_norm(out, gate).view(len(out), 1, -1))


def _layer(net: Any, number: int, shared: Any) -> Any:
    from fla.modules.l2norm import l2norm

    def own_channels(weight: Tensor) -> Tensor:
        """Return the entries of a convolution's weight for this rank's heads."""
        if shared is NOT_SHARED:
            return weight
        keys, values = net.qk_dim_local_tp, net.v_dim_local_tp
        widths = net.key_head_dim, net.key_head_dim, net.value_head_dim
        parts = zip(weight.split([keys, keys, values]), widths, strict=True)
        return torch.cat([shared.own_heads(part.unflatten(0, (-1, width))).flatten(0, 1) for part, width in parts])

    return DeltaLayer(
        number=number,
        filters=own_channels(net.conv1d.weight),
        bias=own_channels(net.conv1d.bias) if net.conv_bias else None,
        decay=shared.own_heads(net.A_log),
        step=shared.own_heads(net.dt_bias),
        rule=net.gated_delta_rule,
        normalise=l2norm if net.use_qk_l2norm else None,
        convolve=None if net.config.deterministic_mode else functools.partial(_convolve, net.activation),
        activation=net.act_fn,
    )


def _convolve(activation: str, rows: Tensor, filters: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    from fla.modules.convolution import causal_conv1d

    return causal_conv1d(x=rows, weight=filters, bias=bias, activation=activation, cu_seqlens=offsets)[0]
