"""Attention and state-space layers in plain torch, for what Megatron has no path on a CPU.

`--spec tests.support.mcore.stand_ins hybrid_spec` is a hybrid model with all of its kinds of layers. Imports Megatron.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from megatron.core.models import backends
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import is_layer_window_attention

from tests.support.mcore import local_hybrid

_LATENT_HYBRID = "tests.support.mcore.latent_hybrid"


class PlainAttention(MegatronModule):
    """Causal core attention: with a window, with values of another size than keys, and over context-parallel ranks.

    Ranks hold the chunks of a sequence as Megatron deals them out: of ``2 * ranks`` chunks each has one from the front and its
    counterpart from the back. Keys and values are gathered from all of them.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **_):
        super().__init__(config=config)
        self._group, self._scale = pg_collection.cp, softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if windowed else -1

    def forward(self, query, key, value, attention_mask, **_):
        """Attend from queries to keys, ``[tokens of this rank, rows, heads, size]``."""
        ranks, here = self._group.size(), self._group.rank()
        places = [_positions(len(query), rank, ranks) for rank in range(ranks)]
        if ranks > 1:
            key, value = (gather_from_sequence_parallel_region(one, group=self._group) for one in (key, value))
        behind = places[here][:, None] - torch.cat(places)[None]
        hidden = (behind < 0) | (behind > self._window if self._window >= 0 else False)
        key, value = (one.repeat_interleave(query.shape[2] // one.shape[2], dim=2) for one in (key, value))
        scores = torch.einsum("qbnd,kbnd->bnqk", query, key) * (self._scale or query.shape[-1] ** -0.5)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("bnqk,kbnd->qbnd", weights, value).flatten(2)


def _positions(count, rank, ranks):
    half = count // 2
    front, back = rank * half, (2 * ranks - 1 - rank) * half
    return torch.cat([torch.arange(front, front + half), torch.arange(back, back + half)]) if ranks > 1 else torch.arange(count)


class DecayingSums(MegatronModule):
    """A gated state-space mixer whose state decays at a learnt rate per channel."""

    def __init__(self, config, d_model, pg_collection=None, **_):
        super().__init__(config=config)
        options = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        self.in_proj = ColumnParallelLinear(d_model, 2 * d_model, gather_output=False, tp_group=pg_collection.tp, **options)
        self.out_proj = RowParallelLinear(d_model, d_model, input_is_parallel=True, tp_group=pg_collection.tp, **options)
        self.rate = torch.nn.Parameter(torch.linspace(0.1, 2.0, d_model // pg_collection.tp.size()))
        self.rate.tensor_model_parallel, self.rate.partition_dim, self.rate.partition_stride = True, 0, 1

    def forward(self, hidden, **_):
        """Mix along the sequence, ``[tokens, rows, hidden]``."""
        entering, gate = self.in_proj(hidden)[0].chunk(2, dim=-1)
        places = torch.arange(len(entering))
        distance = places[:, None] - places[None]
        decay = (
            torch.exp(-distance.clamp(min=0)[..., None] * torch.nn.functional.softplus(self.rate)) * (distance >= 0)[..., None]
        )
        return self.out_proj(torch.einsum("tsc,sbc->tbc", decay, entering) * torch.sigmoid(gate))


@contextmanager
def plain_attention():
    """Return a context in which all layers that need no Transformer Engine have `PlainAttention`."""
    with mock.patch.object(backends.LocalSpecProvider, "core_attention", return_value=PlainAttention):
        sys.modules.pop(_LATENT_HYBRID, None)  # its spec is made with the attention of the time
        try:
            yield
        finally:
            sys.modules.pop(_LATENT_HYBRID, None)


def has_stand_in(flags):
    """Return True for latent attention, which Megatron's attention cannot run without Transformer Engine."""
    return "--multi-latent-attention" in flags


def _hybrid():
    spec = local_hybrid.stack_spec
    attention = spec.submodules.attention_layer.submodules.self_attention
    plain = replace(attention, submodules=replace(attention.submodules, core_attention=PlainAttention))
    return local_hybrid.with_layers(
        spec,
        attention_layer=local_hybrid.attention_layer(plain),
        mamba_layer=local_hybrid.mamba_layer(ModuleSpec(module=DecayingSums)),
    )


hybrid_spec = _hybrid()
