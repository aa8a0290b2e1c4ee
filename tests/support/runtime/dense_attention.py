"""Causal attention written out in full: what the runtime's kernels and relay must agree with."""

import torch


def dense_attention(q, k, v, scale, window=None, sinks=None):
    """One sequence, bottom-right causal: the last query sees all keys, or itself and as many as the window ahead of it.

    q is [queries, query_heads, channels]; k and v are [keys, kv_heads, channels] with keys >= queries.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    keys = torch.arange(k.shape[0])[None, :]
    hidden = (keys > position) if window is None else (keys > position) | (keys < position - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)
    return torch.einsum("hqk,khc->qhc", scores.softmax(-1)[..., : k.shape[0]], v)


def relative_difference(actual, expected, floor=1e-2):
    """Norm of the difference over the norm of what is expected, or over `floor` where next to nothing is expected."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(floor)).item()
