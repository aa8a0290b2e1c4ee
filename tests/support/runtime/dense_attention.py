"""Causal attention written out in full: what the runtime's kernels and relay must agree with."""

import torch


def dense_attention(q, k, v, scale):
    """One sequence, bottom-right causal: the last query sees all keys.

    q is [queries, query_heads, channels]; k and v are [keys, kv_heads, channels] with keys >= queries.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhc,khc->hqk", q, k) * scale
    position = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    scores = scores.masked_fill(torch.arange(k.shape[0])[None, :] > position, float("-inf"))
    return torch.einsum("hqk,khc->qhc", scores.softmax(-1), v)


def relative_difference(actual, expected, floor=1e-2):
    """Norm of the difference over the norm of what is expected, or over `floor` where next to nothing is expected."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(floor)).item()
