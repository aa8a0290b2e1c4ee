"""Runs the attention of hand-made chunks forward and backward, one layer at a time, and compares with whole sequences."""

import itertools

import torch
from torch.utils.checkpoint import checkpoint

from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, HeadExchange
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.attention.layout import KEYS_AND_VALUES
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

    sequences: queries and cached tensors (keys and values) per sequence, float64, requiring gradients; `weights` is what each
        output is summed with.
    outputs: per layer and chunk, what attention returned.
    group: ranks that share the tokens of every chunk; each then sees the gradients of its own tokens.
    """

    def __init__(
        self,
        lengths,
        chunks,
        token_multiple=1,
        layers=1,
        forward_only=False,
        seed=0,
        group=None,
        kv_heads=KV_HEADS,
        widths=(CHANNELS, CHANNELS),
        layout=KEYS_AND_VALUES,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.layout, self.cached_width = layout, kv_heads * sum(widths)
        keys, values = (x.shape[2] for x in layout.keys_and_values(tuple(torch.zeros(0, kv_heads, w) for w in widths)))
        self.value_channels = values
        shapes = (QUERY_HEADS, keys), *((kv_heads, width) for width in widths)
        self.context_parallel = NOT_SHARED if group is None else HeadExchange(group)
        random = [[torch.randn(n, *shape, generator=generator, dtype=torch.float64) for shape in shapes] for n in lengths]
        self.sequences = [[x.requires_grad_() for x in qkv] for qkv in random]
        self.weights = [torch.randn(n, QUERY_HEADS, values, generator=generator, dtype=torch.float64) for n in lengths]
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
        count = len(self.sequences[0])
        rows = [torch.cat([self.sequences[s.sequence][i][s.start : s.end] for s in segments]) for i in range(count)]
        rows = [self._own(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding), value=7.0)) for x in rows]
        for layer in range(self.layers):

            def attend(q, *cached, layer=layer):
                options = SCALE, self.context_parallel, "auto", self.layout
                return chunk_attention(q, cached, self.contexts[chunk], layer, *options)

            self.outputs[layer, chunk] = RECOMPUTE[mode](attend, *rows)
        return self.outputs[0, chunk]

    def backward(self, chunk):
        """Run a chunk backward through every layer, last to first."""
        segments = self.plan.chunks[chunk].segments
        weight = torch.zeros(self.plan.padded_tokens(chunk), QUERY_HEADS, self.value_channels, dtype=torch.float64)
        weight[: self.plan.chunks[chunk].num_tokens] = torch.cat([self.weights[s.sequence][s.start : s.end] for s in segments])
        for layer in reversed(range(self.layers)):
            (self.outputs.pop((layer, chunk)) * self._own(weight)).sum().backward()

    def _own(self, rows):
        """This rank's part of a chunk's rows."""
        return torch.cat([rows[own] for own in self.context_parallel.shard(len(rows))])

    def whole(self):
        """The same by dense attention: per sequence, output and gradients of queries and cached tensors, over all layers."""
        results = []
        for sequence, weight in zip(self.sequences, self.weights, strict=True):
            inputs = [x.detach().requires_grad_() for x in sequence]
            out = dense_attention(inputs[0], *self.layout.keys_and_values(tuple(inputs[1:])), SCALE)
            (out * weight).sum().backward()
            results.append([out.detach(), *(x.grad * self.layers for x in inputs)])
        return results

    def chunked(self):
        """Gradients of queries and cached tensors of every sequence as the chunks left them."""
        return [[x.grad for x in sequence] for sequence in self.sequences]

    def cache_bytes(self):
        """Cached tensors of every sliced sequence and of what shares the chunk of its tail."""
        firsts = [x.view for x in self.contexts if x.view is not None and x.view.start == 0]
        return sum(self.layers * size_class(view.capacity) * self.cached_width * 8 for view in firsts)


def _of(layout, relay):
    return layout.table, relay, layout.view


def slices(sequence, *cuts):
    """The slices of a sequence between cuts, each a chunk of its own."""
    return [[(sequence, a, b)] for a, b in itertools.pairwise(cuts)]
