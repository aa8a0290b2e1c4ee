"""Where the gradients of a long prefix would be large, they are made for few heads at a time: the same bits, less memory."""

from itertools import pairwise

import pytest
import torch

from megatron_epp.plan import Chunk, Segment, sizing
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, base
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from tests.cpu.test_runtime_kv_offload import CASES, HOSTS, run
from tests.support.runtime.allocations import peak_bytes_of
from tests.support.runtime.relay_chunks import RECOMPUTE, ChunkedLayer
from tests.support.seeds import spread_by_default


def layer_of(case, kv_heads, layers=2):
    layer = ChunkedLayer(*CASES[case], layers=layers, kv_heads=kv_heads)
    layer.sequences = [[x.detach().bfloat16().requires_grad_() for x in qkv] for qkv in layer.sequences]
    layer.weights = [x.bfloat16() for x in layer.weights]
    return layer


@spread_by_default(3, case=CASES, kv_heads=(4, 2), when=(None, *HOSTS), mode=RECOMPUTE, fp32_gradients=("off", "on"))
def test_gradients_are_those_of_all_heads_at_once(monkeypatch, case, kv_heads, when, mode, fp32_gradients):
    together, apart = (layer_of(case, kv_heads) for _ in range(2))
    run(together, None, mode, fp32_gradients)
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 1)
    seen = []
    heads_at_once = base.heads_at_once
    monkeypatch.setattr(base, "heads_at_once", lambda *sizes: seen.append(heads_at_once(*sizes)) or seen[-1])
    run(apart, when and HOSTS[when](), mode, fp32_gradients)
    assert set(seen) == {1}
    for expected, actual in zip(together.chunked(), apart.chunked(), strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("fp32_gradients", ["off", "on"])
@pytest.mark.parametrize("is_last_slice", [False, True])
def test_behind_a_long_prefix_there_is_what_one_key_head_takes_at_a_time(monkeypatch, is_last_slice, fp32_gradients):
    prefix, end, heads, channels = 4000, 4004, 8, 8

    def peak_bytes(most_bytes):
        """Without the sums, which stay."""
        monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", most_bytes)
        kv_cache = SlicedKVCache(fp32_gradients)
        length = end if is_last_slice else end + 1
        cuts = [0, prefix, end] + ([] if is_last_slice else [length])
        views = [SliceView(0, *cut, length, length) for cut in pairwise(cuts)]
        for view in views:
            kv_cache.append(0, view, [torch.randn(view.num_cached, heads, channels) for _ in "kv"])
        if not is_last_slice:
            kv_cache.take_gradient(0, views[2], [torch.randn(length, heads, channels) for _ in "kv"])
        view, table = views[1], SegmentTable.build(Chunk((Segment(0, prefix, end),)), end - prefix)
        q, grad = (torch.randn(end - prefix, heads, channels) for _ in range(2))
        k, v = kv_cache.fetch(0, view, (q[:0], q[:0]))
        out, saved = EXACT_ATTENTION.forward(q, k, v, table, 1.0)
        before, sums = kv_cache.num_bytes, []

        def take(dk, dv, shared):
            own = kv_cache.take_gradient(0, view, (dk, dv), 0, shared)
            sums.append(kv_cache.num_bytes - before)
            return own

        made = peak_bytes_of(lambda: base.backward_by_heads(EXACT_ATTENTION, grad, q, k, v, out, saved, table, 1.0, take))
        return made - sums[-1]

    one_head = 2 * end * channels * 4
    assert peak_bytes(1) < 2.2 * one_head  # the kernel's own, block by block, next to what it gives back
    assert peak_bytes(1 << 30) > (4 if is_last_slice else 7) * one_head
