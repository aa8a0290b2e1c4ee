"""Attention with windows and sinks, on slices and packed sequences, computes what dense attention does on each sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, offsets_of
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput
from megatron_epp.runtime.context import ChunkContext
from tests.support.runtime.dense_attention import dense_attention
from tests.support.runtime.mixed_slices import CUTS, LENGTHS, PADDING, check_slices, context_of

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 3, 0.4
LAYERS = ((4, True), (None, True), (11, False))
"""Window of each layer, and whether it has sinks: shorter and longer than slices, and none."""

double = partial(torch.randn, dtype=torch.float64)


class Net(torch.nn.Module):
    """Layers of attention with projections of their own."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(len(LAYERS)):
            into = torch.nn.Parameter(0.5 * double(HEADS * WIDTH, (HEADS + 2 * KV_HEADS) * WIDTH))
            self.register_parameter(f"into_{number}", into)
            self.register_parameter(f"sinks_{number}", torch.nn.Parameter(double(HEADS)))

    def heads(self, number: int, x: Tensor) -> tuple[Tensor, ...]:
        projected: Tensor = x @ getattr(self, f"into_{number}")
        return projected.unflatten(1, (-1, WIDTH)).split([HEADS, KV_HEADS, KV_HEADS], 1)

    def sinks(self, number: int) -> Tensor | None:
        return getattr(self, f"sinks_{number}") if LAYERS[number][1] else None

    def layer(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        q, k, v = self.heads(number, x)
        out = chunk_attention(q, (k, v), context, number, SCALE, sinks=self.sinks(number), window=LAYERS[number][0])
        return x + out.flatten(1)

    def whole(self, x: Tensor) -> Tensor:
        for number, (window, _) in enumerate(LAYERS):
            x = x + dense_attention(*self.heads(number, x), SCALE, window, self.sinks(number)).flatten(1)
        return x


def run(net: Net, chunk: Chunk, x: Tensor, kv_cache: SlicedKVCache, recompute: str) -> Tensor:
    for number in range(len(LAYERS)):
        context = context_of(chunk, kv_cache)
        if recompute == "all but attention":
            context = replace(context, attention_output=CachedAttentionOutput())
        if recompute == "none":
            x = net.layer(number, x, context)
        else:
            x = checkpoint(net.layer, number, x, context, use_reentrant=True)
    return x


@pytest.mark.parametrize("recompute", ["none", "all but attention", "all"])
def test_slices_and_packed_sequences_have_the_gradients_of_each_sequence(recompute: str) -> None:
    torch.manual_seed(3)
    net = Net()
    weights = {name: weight for name, weight in net.named_parameters() if name != "sinks_2"}
    check_slices(HEADS * WIDTH, weights, lambda _, x: net.whole(x), lambda *chunk: run(net, *chunk, recompute=recompute), 1e-11)


def test_a_slice_hands_on_no_more_rows_than_its_window() -> None:
    kv_cache, x = SlicedKVCache(), double(8, HEADS, WIDTH)
    context = context_of(Chunk((Segment(0, 0, 8),)), kv_cache)
    with torch.no_grad():
        chunk_attention(x, (x[:, :KV_HEADS], x[:, :KV_HEADS]), context, 0, SCALE, window=3)
    assert kv_cache.handover.num_bytes == 2 * 3 * KV_HEADS * WIDTH * 8
    assert kv_cache.cache_bytes == 0


def test_an_evaluation_leaves_nothing() -> None:
    net, kv_cache = Net(), SlicedKVCache()
    x = double(LENGTHS[0], HEADS * WIDTH)
    with torch.no_grad():
        outs = []
        for ends in CUTS:
            out = torch.cat([x[slice(*ends)], x[:PADDING]])
            for number in range(len(LAYERS)):
                out = net.layer(number, out, context_of(Chunk((Segment(0, *ends),)), kv_cache, forward_only=True))
            outs.append(out[:-PADDING])
        torch.testing.assert_close(torch.cat(outs), net.whole(x), rtol=1e-12, atol=1e-12)
    kv_cache.assert_empty()


def test_offsets_within_a_window_need_no_other_copy_from_the_host() -> None:
    table = SegmentTable.build(Chunk((Segment(0, 11, 20), Segment(1, 0, 4), Segment(2, 0, 1))), 16)
    device = torch.device("cpu")
    table.cu_seqlens(device)
    for window in (3, 11, 40):
        within = table.within(window)
        assert within is table.within(window)
        assert within.key_starts[1] == min(11, window) + 9
        torch.testing.assert_close(within._on_device[device], offsets_of(within), rtol=0, atol=0)
        assert table.cu_seqlens(device)[1].tolist() == [0, 20, 24, 25, 27]
