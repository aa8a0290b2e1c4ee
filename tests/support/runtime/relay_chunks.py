"""Runs the attention of hand-made chunks forward and backward, one layer at a time, and compares with whole sequences."""

import itertools

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_epp.plan.size_class import size_class
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.context import ChunkContext, chunk_layouts
from tests.support.runtime.dense_attention import dense_attention
from tests.support.runtime.synthetic_sequences import plan_of

QUERY_HEADS, KV_HEADS, CHANNELS, SCALE = 4, 2, 4, 0.4
RECOMPUTE = {
    "kept": lambda run, *x: run(*x),
    "recomputed": lambda run, *x: checkpoint(run, *x, use_reentrant=False),
    "recomputed, reentrant": lambda run, *x: checkpoint(run, *x, use_reentrant=True),
}


class ChunkedLayer:
    """Queries, keys and values of whole sequences, run as chunks through `layers` attention layers with the same inputs.

    sequences: (q, k, v) per sequence, float64, requiring gradients; `weights` is what each output is summed with.
    outputs: per layer and chunk, what attention returned.
    group: ranks that share the tokens of every chunk; each then sees the gradients of its own tokens.
    """

    def __init__(self, lengths, chunks, token_multiple=1, layers=1, forward_only=False, seed=0, group=None, kv_heads=KV_HEADS):
        generator = torch.Generator().manual_seed(seed)
        heads = QUERY_HEADS, kv_heads, kv_heads
        self.group = group
        self.shard, self.num_shards = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        random = [[torch.randn(n, h, CHANNELS, generator=generator, dtype=torch.float64) for h in heads] for n in lengths]
        self.sequences = [[x.requires_grad_() for x in qkv] for qkv in random]
        self.weights = [torch.randn(n, QUERY_HEADS, CHANNELS, generator=generator, dtype=torch.float64) for n in lengths]
        self.plan = plan_of(lengths, chunks, token_multiple)
        self.relay = KVRelay()
        self.layers = layers
        self.contexts = [ChunkContext(c, *_of(layout, self.relay)) for c, layout in enumerate(chunk_layouts(self.plan))]
        if forward_only:
            self.contexts = [ChunkContext(x.chunk, x.table, x.relay, x.view, forward_only=True) for x in self.contexts]
        self.outputs = {}

    def forward(self, chunk, mode="kept"):
        """Run a chunk through every layer; `mode` is a key of RECOMPUTE."""
        segments = self.plan.chunks[chunk].segments
        padding = self.plan.padded_tokens(chunk) - self.plan.chunks[chunk].num_tokens
        rows = [torch.cat([self.sequences[s.sequence][i][s.start : s.end] for s in segments]) for i in range(3)]
        q, k, v = (self._own(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=7.0)) for x in rows)
        for layer in range(self.layers):

            def attend(q, k, v, layer=layer):
                return chunk_attention(q, k, v, self.contexts[chunk], layer, SCALE, self.group)

            self.outputs[layer, chunk] = RECOMPUTE[mode](attend, q, k, v)
        return self.outputs[0, chunk]

    def backward(self, chunk):
        """Run a chunk backward through every layer, last to first."""
        segments = self.plan.chunks[chunk].segments
        weight = torch.zeros(self.plan.padded_tokens(chunk), QUERY_HEADS, CHANNELS, dtype=torch.float64)
        weight[: self.plan.chunks[chunk].num_tokens] = torch.cat([self.weights[s.sequence][s.start : s.end] for s in segments])
        for layer in reversed(range(self.layers)):
            (self.outputs.pop((layer, chunk)) * self._own(weight)).sum().backward()

    def _own(self, rows):
        """This rank's part of a chunk's rows."""
        return rows.chunk(self.num_shards)[self.shard]

    def whole(self):
        """The same by dense attention: output and gradients of q, k, v for every sequence, over all layers."""
        results = []
        for (q, k, v), weight in zip(self.sequences, self.weights, strict=True):
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out = dense_attention(*inputs, SCALE)
            (out * weight).sum().backward()
            results.append([out.detach(), *(x.grad * self.layers for x in inputs)])
        return results

    def chunked(self):
        """Gradients of q, k, v of every sequence as the chunks left them."""
        return [[x.grad for x in qkv] for qkv in self.sequences]

    def cache_bytes(self):
        """Keys and values of every sliced sequence and of what shares the chunk of its tail."""
        firsts = [x.view for x in self.contexts if x.view is not None and x.view.start == 0]
        return sum(self.layers * 2 * size_class(view.capacity) * KV_HEADS * CHANNELS * 8 for view in firsts)


def _of(layout, relay):
    return layout.table, relay, layout.view


def slices(sequence, *cuts):
    """The slices of a sequence between cuts, each a chunk of its own."""
    return [[(sequence, a, b)] for a, b in itertools.pairwise(cuts)]
