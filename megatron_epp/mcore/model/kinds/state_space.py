"""Mamba-2 layers (Nemotron-H, Granite 4), whose slices hand on a state and the last rows ahead of their convolution."""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from megatron_epp.mcore.model.kinds import is_mamba
from megatron_epp.mcore.model.kinds.own_forward import run_chunks
from megatron_epp.mcore.releases import takes_state_dtype
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, of_group, to_heads, to_tokens
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.state_space import StateSpaceLayer


def adopt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Have Mamba-2 layers run chunks. Packed sequences run in one call with their numbers; Megatron would mix them."""
    run_chunks(model, is_mamba, _forward)


def _forward(mixer: Any, number: int, hidden_states: Tensor, context: ChunkContext) -> Any:
    projected, _bias = mixer.in_proj(hidden_states)  # of all tokens that tensor-parallel ranks share
    rows, group = projected[:, 0], mixer.pg_collection.cp
    layer, shared = _layer(mixer, number), of_group(group)
    if shared is NOT_SHARED:
        out = layer(rows, context)
    else:
        inner, states, heads = mixer.d_inner_local_tp, mixer.ngroups_local_tp * mixer.d_state, mixer.nheads_local_tp
        channels = mixer.headdim, mixer.headdim, mixer.d_state, mixer.d_state, 1
        parts = zip(rows.split([inner, inner, states, states, heads], dim=1), channels, strict=True)
        own = to_heads(group, *(part.unflatten(1, (-1, width)) for part, width in parts))
        out = layer(torch.cat([part.flatten(1) for part in own], dim=1), context)
        out = to_tokens(group, out.unflatten(1, (-1, mixer.headdim))).flatten(1)
    out = out[:, None]
    return mixer.out_proj(mixer.norm(out) if mixer.rmsnorm else out)


def _layer(mixer: Any, number: int) -> Any:
    own = mixer.cp  # weights of the heads that this context-parallel rank has
    skip = own.get_D().float().unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else own.get_D()
    filters = own.get_conv1d_weight()[:, 0]
    dtype = {"state_dtype": mixer.mamba_training_ssm_states_dtype} if takes_state_dtype() else {}
    scan = functools.partial(
        mamba_mixer.mamba_split_conv1d_scan_combined,
        conv1d_weight=filters,
        conv1d_bias=own.get_conv1d_bias(),
        dt_bias=own.get_dt_bias().float(),
        A=-own.get_A_log().float().exp(),
        D=skip,
        chunk_size=mixer.chunk_size,
        activation=mixer.activation,
        headdim=None if mixer.D_has_hdim else mixer.headdim,
        ngroups=own.ngroups_local_tpcp,
        norm_before_gate=mixer.norm_before_gate,
        **dtype,
    )
    return StateSpaceLayer(
        number=number,
        scan=scan,
        gate_width=own.d_inner_local_tpcp,
        mixed_width=len(filters),
        filter_width=mixer.d_conv,
    )
