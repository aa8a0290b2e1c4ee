"""Programs of the context-parallel ranks in the tests that exchange tokens for heads."""

import torch
import torch.distributed as dist

from megatron_epp.runtime.attention.context_parallel import to_heads, to_tokens
from megatron_epp.runtime.offload.host import HostMemory
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.relay_chunks import CHANNELS, ChunkedLayer


def there_and_back(rank, links, num_heads):
    """Numbered tokens and heads, exchanged and exchanged back: what this rank has in between, and whether nothing changed."""
    size = len(links.ranks)
    numbered = torch.arange(8)[:, None, None] * 100 + torch.arange(num_heads)[None, :, None] + torch.zeros(8, num_heads, 3)
    own = numbered.chunk(size)[rank].clone()
    (between,) = to_heads(links.activations, own)
    back = to_tokens(links.activations, between)
    return between[:, :, 0].int().tolist(), back.shape == own.shape and bool(torch.equal(back, own))


def differences(rank, links, lengths, chunks, token_multiple, mode, offloads=False, **options):
    """Run a layer's chunks with their tokens shared by the ranks; the largest difference from whole sequences on one rank.

    `offloads`: caches of sliced sequences are in host memory between uses. `options`: as `ChunkedLayer` takes them.
    """
    layer = ChunkedLayer(lengths, chunks, token_multiple, layers=2, group=links.activations, **options)
    layer.kv_cache.begin(
        range(len(lengths)) if offloads else (), HostMemory(torch.device("cpu"), 1 << 30) if offloads else None
    )
    num_whole = 0 if mode == "kept" else layer.layers
    whole = layer.whole()
    worst = []
    for c, chunk in enumerate(layer.plan.chunks):
        with layer.kv_cache.running(layer.contexts[c].view, False):
            out = layer.forward(c, mode).detach()
        parts = [torch.empty_like(out) for _ in links.ranks]
        dist.all_gather(parts, out, group=links.activations)
        rows = torch.cat([whole[s.sequence][0][s.start : s.end] for s in chunk.segments])
        worst.append(relative_difference(torch.cat(parts)[: len(rows)], rows))
    for c in reversed(range(len(layer.plan.chunks))):
        with layer.kv_cache.running(layer.contexts[c].view, True, num_whole):
            layer.backward(c)
    layer.kv_cache.assert_empty()
    for expected, grads in zip(whole, layer.chunked(), strict=True):
        for wanted, grad in zip(expected[1:], grads, strict=True):
            dist.all_reduce(grad, group=links.activations)
            worst.append(relative_difference(grad, wanted))
    for weight, wanted in ((layer.expansion, layer.expansion_gradient), (layer.sinks, layer.sinks_gradient)):
        if weight is not None:
            dist.all_reduce(weight.grad, group=links.activations)
            worst.append(relative_difference(weight.grad, wanted))
    return max(worst)


def cache_bytes(rank, links, kv_heads, query_heads):
    """Key heads in the cache of one rank after the first slice, where ranks share the heads."""
    sizes = []
    for group in (None, links.activations):
        layer = ChunkedLayer(
            (16,), [[(0, 0, 8)], [(0, 8, 16)]], len(links.ranks), group=group, kv_heads=kv_heads, query_heads=query_heads
        )
        layer.forward(0)
        sizes.append(layer.kv_cache.num_bytes)
    assert sizes[0] == 2 * 16 * kv_heads * CHANNELS * 8
    return sizes[1] // (2 * 16 * CHANNELS * 8)
