"""Runs the attention of hand-made chunks forward and backward, one layer at a time, and compares with whole sequences."""

import functools
import itertools
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, HeadExchange
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.latents import latent_attention
from megatron_epp.runtime.attention.windows import window_attention
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput
from megatron_epp.runtime.context import ChunkContext, chunk_layouts
from tests.support.runtime.dense_attention import dense_attention
from tests.support.runtime.synthetic_sequences import plan_of

QUERY_HEADS, KV_HEADS, CHANNELS, SCALE = 4, 2, 4, 0.4
RECOMPUTE = {
    "kept": lambda run, *x: run(*x),
    "recomputed": lambda run, *x: checkpoint(run, *x, use_reentrant=False),
    "recomputed, reentrant": lambda run, *x: checkpoint(run, *x, use_reentrant=True),
}
ALL_BUT_ATTENTION = "all but attention is recomputed"


class ChunkedLayer:
    """Queries, keys and values of whole sequences, run as chunks through `layers` attention layers with the same inputs.

    sequences: queries and cached tensors (keys and values) per sequence, float64, requiring gradients; `weights` is what each
        output is summed with.
    expansion: the matrix that makes keys and values where latents of one head are cached (`unrotated`: channels of a key that
        it makes), else None.
    outputs: per layer and chunk, what attention returned.
    group: ranks that share the tokens of every chunk; each then sees the gradients of its own tokens.
    """

    def __init__(
        self,
        lengths,
        chunks,
        token_multiple=1,
        layers=1,
        *,
        forward_only=False,
        group=None,
        kv_heads=KV_HEADS,
        widths=(CHANNELS, CHANNELS),
        unrotated=0,
        dtype=torch.float64,
        window=None,
        query_heads=QUERY_HEADS,
        has_sinks=False,
    ):
        randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=dtype)
        self.query_heads = query_heads
        self.cached_width, self.unrotated, self.expansion = kv_heads * sum(widths), unrotated, None
        keys, values = widths
        if unrotated:
            keys, values = unrotated + widths[1], CHANNELS + 1
            self.expansion = randn(query_heads, unrotated + values, widths[0]).requires_grad_()
        self.value_channels = values
        shapes = (query_heads, keys), *((kv_heads, width) for width in widths)
        self.context_parallel = NOT_SHARED if group is None else HeadExchange(group)
        self.sequences = [[randn(n, *shape).requires_grad_() for shape in shapes] for n in lengths]
        self.weights = [randn(n, query_heads, values) for n in lengths]
        self.sinks = randn(query_heads).requires_grad_() if has_sinks else None
        self.plan = plan_of(lengths, chunks, token_multiple)
        self.kv_cache = SlicedKVCache()
        self.layers, self.window = layers, window
        self.contexts = [
            ChunkContext(c, layout.table, self.kv_cache, layout.view, forward_only=forward_only, begun=layout.begun)
            for c, layout in enumerate(chunk_layouts(self.plan))
        ]
        self.outputs = {}

    def forward(self, chunk, mode="kept"):
        """Run a chunk through every layer; `mode` is a key of RECOMPUTE, or ALL_BUT_ATTENTION."""
        segments = self.plan.chunks[chunk].segments
        padding = self.plan.padded_tokens(chunk) - self.plan.chunks[chunk].num_tokens
        count = len(self.sequences[0])
        rows = [torch.cat([self.sequences[s.sequence][i][s.start : s.end] for s in segments]) for i in range(count)]
        rows = [self._own(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=7.0)) for x in rows]
        for layer in range(self.layers):
            context, recompute = self.contexts[chunk], RECOMPUTE.get(mode)
            if mode == ALL_BUT_ATTENTION:
                context = replace(context, attention_output=CachedAttentionOutput())
                recompute = RECOMPUTE["recomputed, reentrant"]

            def attend(q, *cached, layer=layer, context=context):
                options = context, layer, SCALE, self.context_parallel
                if self.expansion is None:
                    if self.window is not None:
                        return window_attention(q, cached, *options, sinks=self.sinks, window=self.window)
                    return chunk_attention(q, cached, *options, sinks=self.sinks)
                return latent_attention(q, *cached, self.expansion, *options)

            self.outputs[layer, chunk] = recompute(attend, *rows)
        return self.outputs[0, chunk]

    def backward(self, chunk):
        segments = self.plan.chunks[chunk].segments
        size = self.plan.padded_tokens(chunk), self.query_heads, self.value_channels
        weight = torch.zeros(size, dtype=self.weights[0].dtype)
        weight[: self.plan.chunks[chunk].num_tokens] = torch.cat([self.weights[s.sequence][s.start : s.end] for s in segments])
        for layer in reversed(range(self.layers)):
            (self.outputs.pop((layer, chunk)) * self._own(weight)).sum().backward()

    def _own(self, rows):
        return torch.cat([rows[own] for own in self.context_parallel.shard(len(rows))])

    def whole(self):
        """The same by dense attention: per sequence, output and gradients of queries and cached tensors, over all layers."""
        results = []
        expansion, sinks = (None if x is None else x.detach().requires_grad_() for x in (self.expansion, self.sinks))
        for sequence, weight in zip(self.sequences, self.weights, strict=True):
            inputs = [x.detach().requires_grad_() for x in sequence]
            seen = inputs[1:] if expansion is None else self._expanded(expansion, *inputs[1:])
            out = dense_attention(inputs[0], *seen, SCALE, self.window, sinks)
            (out * weight).sum().backward()
            results.append([out.detach(), *(x.grad * self.layers for x in inputs)])
        self.expansion_gradient = None if expansion is None else expansion.grad * self.layers
        self.sinks_gradient = None if sinks is None else sinks.grad * self.layers
        return results

    def _expanded(self, expansion, latent, rotated):
        of_keys, of_values = expansion[:, : self.unrotated], expansion[:, self.unrotated :]
        keys = torch.einsum("hcr,tr->thc", of_keys, latent[:, 0])
        everyones = rotated.expand(-1, self.query_heads, -1)
        return torch.cat([keys, everyones], 2), torch.einsum("hcr,tr->thc", of_values, latent[:, 0])

    def chunked(self):
        """Gradients of queries and cached tensors of every sequence as the chunks left them."""
        return [[x.grad for x in sequence] for sequence in self.sequences]

    def cache_bytes(self):
        """Cached tensors of every sliced sequence and of what shares the chunk of its tail."""
        views = [view for x in self.contexts for view in (x.view, x.begun)]
        firsts = [view for view in views if view is not None and view.start == 0]
        return sum(self.layers * size_class(view.capacity) * self.cached_width * 8 for view in firsts)


def slices(sequence, *cuts):
    return [[(sequence, a, b)] for a, b in itertools.pairwise(cuts)]
