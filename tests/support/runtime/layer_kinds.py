"""Kinds of layers for `plain_stage`: how each runs in a chunk, and on a sequence by itself by dense computation."""

import torch
from torch import nn

from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.latents import keys_and_values, latent_attention
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.attention.windows import window_attention
from megatron_epp.runtime.context import ChunkContext
from tests.support.plan.small_plans import chunk
from tests.support.runtime.dense_attention import dense_attention
from tests.support.runtime.plain_stage import CHANNELS, HIDDEN, QUERY_HEADS, SCALE, Layer, PlainStage
from tests.support.runtime.recurrent_nets import DeltaNet, StateSpaceNet

RANK, ROTATED, UNROTATED = 6, 2, 3


class Full(Layer):
    """A layer of attention. `number` is that in its stage."""

    def in_chunk(self, number, x, context):
        return self(x, lambda q, *cached: chunk_attention(q, cached, context, number, SCALE))

    def alone(self, number, x):
        return self(x, lambda *qkv: dense_attention(*qkv, SCALE))


class Window(Layer):
    """A layer with sinks that sees `window` tokens ahead of each, or all where it is the second of its stage."""

    def __init__(self, window):
        super().__init__()
        self.window, self.sinks = window, nn.Parameter(torch.randn(QUERY_HEADS))

    def in_chunk(self, number, x, context):
        run, more = (chunk_attention, {}) if number else (window_attention, {"window": self.window})
        return self(x, lambda q, *cached: run(q, cached, context, number, SCALE, sinks=self.sinks, **more))

    def alone(self, number, x):
        return self(x, lambda *qkv: dense_attention(*qkv, SCALE, None if number else self.window, self.sinks))


class Latent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.into = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, QUERY_HEADS * (UNROTATED + ROTATED) + RANK + ROTATED)
        self.expansion, self.out = nn.Parameter(torch.randn(QUERY_HEADS, UNROTATED + CHANNELS, RANK)), nn.Linear(16, HIDDEN)

    def run(self, x, attend):
        q, latent, rotated = self.into(self.norm(x)).split([QUERY_HEADS * (UNROTATED + ROTATED), RANK, ROTATED], 1)
        return x + self.out(attend(q.unflatten(1, (QUERY_HEADS, -1)), latent[:, None], rotated[:, None]).flatten(1))

    def in_chunk(self, number, x, context):
        return self.run(x, lambda *rows: latent_attention(*rows, self.expansion, context, number, SCALE))

    def alone(self, number, x):
        return self.run(x, lambda q, *rows: dense_attention(q, *keys_and_values(rows, self.expansion, UNROTATED), SCALE))


class Recurrent(nn.Module):
    """A net of `recurrent_nets`, which runs a sequence by itself token by token."""

    def __init__(self, net):
        super().__init__()
        self.into, self.net, self.out = nn.Linear(HIDDEN, net.width), net, nn.Linear(net.width, HIDDEN)

    def in_chunk(self, number, x, context):
        return x + self.out(self.net(number, self.into(x).tanh(), context))

    def alone(self, number, x):
        return self.in_chunk(number, x, ChunkContext(0, SegmentTable.build(chunk((0, 0, len(x))), len(x)), SlicedKVCache()))


class Hybrid(Recurrent):
    """A net of Mamba-2, or a layer of attention where it is the second of its stage."""

    def __init__(self):
        super().__init__(StateSpaceNet())
        self.attention = Full()

    def in_chunk(self, number, x, context):
        return self.attention.in_chunk(number, x, context) if number else super().in_chunk(number, x, context)

    def alone(self, number, x):
        return self.attention.alone(number, x) if number else super().alone(number, x)


KINDS = {
    "full attention": Full,
    "a window of 1, sinks": lambda: Window(1),
    "a window of 6, sinks": lambda: Window(6),
    "latents": Latent,
    "gated delta, kernels of packed sequences": lambda: Recurrent(DeltaNet(packs=True)),
    "gated delta, sequence by sequence": lambda: Recurrent(DeltaNet(packs=False)),
    "Mamba-2": lambda: Recurrent(StateSpaceNet()),
    "Mamba-2 and attention": Hybrid,
}


class KindStage(PlainStage):
    """A stage of layers of a kind. Recompute is Megatron's, which is reentrant."""

    def __init__(self, part, batch):
        super().__init__(part, batch, reentrant=True)

    def run(self, number, x, context):
        return self.part.layers[number].in_chunk(number, x, context)
