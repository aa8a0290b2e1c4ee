"""Stand-ins for the libraries of attention kernels: their functions by their names of arguments, computed in exact blocks.

Like the libraries they know a chunk by its offsets alone, and skip segments without queries. What they were called with is
added to a list.
"""

import types

import torch

from megatron_epp.plan import Segment
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION
from megatron_epp.runtime.attention.segments import SegmentTable


def table_of(cu_q, cu_k, window=-1):
    """The segments between offsets that have queries, and the window by its left side, as libraries take it."""
    rows = zip(cu_q.tolist(), cu_q.diff().tolist(), cu_k.tolist(), cu_k.diff().tolist(), strict=False)
    rows = [(q, n, k, keys) for q, n, k, keys in rows if n]
    segments = tuple(Segment(number, keys - n, keys) for number, (_, n, _, keys) in enumerate(rows))
    starts = ((*(row[at] for row in rows), int(cu[-1])) for at, cu in ((0, cu_q), (2, cu_k)))
    return SegmentTable(segments, *starts, None if window < 0 else window)


def exact_flash_attn(calls):
    """The functions of flash-attn's interface that are used, by its names of arguments, computed in exact blocks."""
    module = types.ModuleType("flash_attn_interface")

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    ):  # fmt: skip
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), max_seqlen_q, max_seqlen_k, causal, dropout_p))
        out, (lse,) = EXACT_ATTENTION.forward(q, k, v, table_of(cu_seqlens_q, cu_seqlens_k, window_size_left), softmax_scale)
        return out, lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        found = EXACT_ATTENTION.backward(
            dout, q, k, v, out, (softmax_lse,), table_of(cu_seqlens_q, cu_seqlens_k, window_size_left), softmax_scale
        )
        for target, value in zip((dq, dk, dv), found, strict=True):
            target.copy_(value)

    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


def exact_flash_attn_3(calls):
    """The functions of FlashAttention 3's interface that are used, by its names of arguments, computed in exact blocks."""
    module = types.ModuleType("flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
        window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, num_splits=1, sm_margin=0,
    ):  # fmt: skip
        assert k_new is v_new is qv is out_ is cu_seqlens_k_new is seqused_q is seqused_k is None
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), max_seqlen_q, max_seqlen_k, causal, 0.0))
        out, (lse,) = EXACT_ATTENTION.forward(q, k, v, table_of(cu_seqlens_q, cu_seqlens_k, window_size_left), softmax_scale)
        return out, lse, torch.tensor([]), torch.tensor([])

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
        max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
        window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert is_causal
        assert sequed_q is sequed_k is None
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        found = EXACT_ATTENTION.backward(
            dout, q, k, v, out, (softmax_lse,), table_of(cu_seqlens_q, cu_seqlens_k, window_size_left), softmax_scale
        )
        for target, value in zip((dq, dk, dv), found, strict=True):
            target.copy_(value)
        return torch.empty(0)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return module


def exact_transformer_engine(calls):
    """As Transformer Engine's fused attention, by its names of arguments in 2.15 and newer, computed in exact blocks. As there,
    a forward draws from the generator it is given, or from torch's own.
    """
    module = types.ModuleType("fused_attn")
    module.FusedAttnBackend = {"F16_arbitrary_seqlen": "arbitrary"}
    module.TORCH_DType = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16}

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend,
        cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1), rng_gen=None,
    ):  # fmt: skip
        torch.rand(1, generator=rng_gen)
        causal = attn_mask_type == "padding_causal_bottom_right" and qkv_layout == "thd_thd_thd"
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), max_seqlen_q, max_seqlen_kv, causal, dropout))
        out, (lse,) = EXACT_ATTENTION.forward(q, k, v, table_of(cu_seqlens_q, cu_seqlens_kv, window_size[0]), attn_scale)
        return out, [lse.t().unsqueeze(-1), torch.zeros(2)]

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
        qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", attn_bias_type="no_bias",
        attn_mask_type="padding", window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False,
    ):  # fmt: skip
        assert (o_format, do_format, dqkv_layout, bottom_right_diagonal) == ("thd", "thd", "thd_thd_thd", True)
        assert all(x.is_contiguous() for x in (q, k, v, o, d_o)), "it sees addresses only"
        table, lse = table_of(cu_seqlens_q, cu_seqlens_kv, window_size[0]), aux_ctx_tensors[0][..., 0].t()
        return *EXACT_ATTENTION.backward(d_o, q, k, v, o, (lse,), table, attn_scale), None

    module.fused_attn_fwd, module.fused_attn_bwd = fused_attn_fwd, fused_attn_bwd
    return module


def older_transformer_engine(calls):
    """Attention by the names of 2.0 to 2.14: backward is told a type, and not where the diagonal is."""
    module = exact_transformer_engine(calls)
    newer = module.fused_attn_bwd

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
        qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert module.TORCH_DType[dqkv_dtype] == fake_dtype == q.dtype
        formats = {"o_format": "thd", "do_format": "thd", "dqkv_layout": "thd_thd_thd", "bottom_right_diagonal": True}
        return newer(
            max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
            fused_attention_backend, attn_scale=attn_scale, window_size=window_size, **formats,
        )  # fmt: skip

    module.fused_attn_bwd = fused_attn_bwd
    return module
