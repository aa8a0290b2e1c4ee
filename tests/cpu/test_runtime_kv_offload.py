"""Keys and values that are in host memory between uses give the same gradients, to the bit, and leave the device the room."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.host_store import HostStore, PieceReader
from megatron_epp.plan import Chunk, Segment, sizing
from megatron_epp.plan.kv_offload import head_parts, in_units
from megatron_epp.plan.sizing import size_class
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, base
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import KVCacheError, SegmentTable, SliceView
from tests.support.runtime import runtime_plans
from tests.support.runtime.allocations import peak_bytes_of
from tests.support.runtime.late_host import LATE_HOSTS, late_host
from tests.support.runtime.plain_stage import run_plan
from tests.support.runtime.relay_chunks import CHANNELS, KV_HEADS, RECOMPUTE, ChunkedLayer, slices
from tests.support.runtime.runtime_plans import by_hand, offloading, offloading_kv
from tests.support.seeds import spread_by_default

CPU = torch.device("cpu")
LAYERS = 3
CHUNKS = [*slices(0, 0, 9, 20, 31), [(0, 31, 33), (1, 0, 4)]]
"""Four slices, a short sequence next to the last."""
TWO = [[(0, 0, 5), (2, 0, 3)], [(1, 0, 6)], [(1, 6, 12)], [(0, 5, 9)]]
"""Slices of two sequences between each other, a short sequence next to the first."""
CASES = {
    "one": ((33, 4), CHUNKS, 1),
    "two": ((9, 12, 3), TWO, 1),
    "padded": ((13, 4), [[(0, 0, 8)], [(0, 8, 13), (1, 0, 4)]], 4),
    "begun behind an end": ((13, 12, 3), [[(0, 0, 8)], [(0, 8, 13), (2, 0, 3), (1, 0, 4)], [(1, 4, 8)], [(1, 8, 12)]], 4),
}


PIECE = 2 * size_class(37) * KV_HEADS * CHANNELS * 8 // head_parts(KV_HEADS)
HOSTS = {"at once": lambda: HostMemory(CPU, 1 << 30), **LATE_HOSTS}


def run(layer, host=None, mode="kept", fp32_gradients="off", forward_only=False):
    """Every chunk forward, then backward, with the caches resident or at a host. Device bytes in every action."""
    kv_cache, seen = layer.kv_cache, []
    kv_cache.fp32_gradients = fp32_gradients
    begun = {context.begun.sequence for context in layer.contexts if context.begun is not None}  # these stay on the device
    kv_cache.offloaded = None if host is None else HostStore(host, set(range(len(layer.sequences))) - begun)
    num_whole = 0 if mode == "kept" else layer.layers
    for c, context in enumerate(layer.contexts):
        with kv_cache.running(context.view, False):
            layer.forward(c, mode)
            seen.append(kv_cache.num_bytes)
    for c in () if forward_only else reversed(range(len(layer.contexts))):
        with kv_cache.running(layer.contexts[c].view, True, num_whole):
            layer.backward(c)
            seen.append(kv_cache.num_bytes)
    kv_cache.assert_empty()
    return seen


def layer_in_bf16(case, **options):
    """A layer of the case in bf16, in which sums in fp32 differ."""
    layer = ChunkedLayer(*CASES[case], **options)
    layer.sequences = [[x.detach().bfloat16().requires_grad_() for x in qkv] for qkv in layer.sequences]
    layer.weights = [x.bfloat16() for x in layer.weights]
    return layer


def same_gradients(plan, other, host=None, **options):
    expected, found = run_plan(0, None, plan, **options), run_plan(0, None, other, host=host, **options)
    for stage, wanted in expected.items():
        assert found[stage].loss == wanted.loss
        for name, gradient in wanted.gradients.items():
            np.testing.assert_array_equal(found[stage].gradients[name], gradient)
        assert found[stage].live_bytes == 0
    return expected, found


@pytest.mark.parametrize("fp32_gradients", ["off", "on"])
@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("when", HOSTS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_resident_caches_whenever_copies_happen(case, when, mode, fp32_gradients):
    resident, kv_offload = (layer_in_bf16(case, layers=LAYERS) for _ in range(2))
    run(resident, mode=mode, fp32_gradients=fp32_gradients)
    run(kv_offload, HOSTS[when](), mode, fp32_gradients)
    for expected, actual in zip(resident.chunked(), kv_offload.chunked(), strict=True):
        assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("make_host", LATE_HOSTS.values(), ids=LATE_HOSTS)
def test_layers_of_another_sequence_wait_for_the_buffers_that_still_leave(make_host):
    chunks = [(0, 0, 9)], [(1, 0, 8)], [(1, 8, 14)], [(0, 9, 14)]
    plan = by_hand(["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0"], chunks, num_layers=4)
    same_gradients(plan, offloading_kv(plan), make_host())


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_the_device_holds_two_pieces_in_forward_and_three_in_backward_however_many_layers_there_are(layers):
    layer, host = ChunkedLayer(*CASES["one"], layers=layers), HostMemory(CPU, 1 << 30)
    assert (run(layer, host), layer.kv_cache.num_bytes) == ([2 * PIECE] * 4 + [3 * PIECE] * 4, 0)
    assert (host.held_bytes, host.held_peak_bytes) == (0, in_units(2 * layer.cache_bytes()))


def test_an_action_has_its_buffers_from_its_start_as_plans_count_them():
    layer = ChunkedLayer(*CASES["one"], layers=2)
    kv_cache, view = layer.kv_cache, layer.contexts[-1].view
    kv_cache.offloaded = HostStore(HostMemory(CPU, 1 << 30), {0})
    for c, context in enumerate(layer.contexts):
        with kv_cache.running(context.view, False):
            layer.forward(c)
    for is_backward, pieces in ((True, 3), (False, 2)):
        with kv_cache.running(view, is_backward):
            assert kv_cache.num_bytes == pieces * PIECE


def test_what_comes_next_is_on_its_way_before_it_is_asked_for(monkeypatch):
    unforeseen, take = [], PieceReader.take

    def watched(self, use):
        if use.num_rows and (self._coming is None or self._coming[0] != use) and self._held != use.group:
            unforeseen.append(use)
        return take(self, use)

    monkeypatch.setattr(PieceReader, "take", watched)
    run(ChunkedLayer(*CASES["one"], layers=LAYERS), late_host(), "recomputed")
    assert not unforeseen


def test_without_backward_the_last_slice_empties_the_host():
    layer = ChunkedLayer((9,), slices(0, 0, 4, 7, 9), layers=2, forward_only=True)
    with torch.no_grad():
        run(layer, host := HostMemory(CPU, 1 << 30), forward_only=True)
    assert host.held_bytes == 0


@pytest.mark.parametrize("host", [None, HostMemory(CPU, 1 << 30)], ids=["resident", "offloaded"])
def test_slices_out_of_order_and_caches_left_over_are_refused(host):
    layer = ChunkedLayer((9,), slices(0, 0, 4, 7, 9))
    kv_cache, views = layer.kv_cache, [context.view for context in layer.contexts]
    kv_cache.offloaded = None if host is None else HostStore(host, {0})
    with kv_cache.running(views[1], False), pytest.raises(KVCacheError, match="at token 4 finds the keys of 0 tokens"):
        layer.forward(1)
    with kv_cache.running(views[0], False):
        layer.forward(0)
    with kv_cache.running(views[2], False), pytest.raises(KVCacheError, match="at token 7 finds the keys of 4 tokens"):
        layer.forward(2)
    for c in (1, 2):
        with kv_cache.running(views[c], False):
            layer.forward(c)
    early = pytest.raises(KVCacheError, match="backward at token 4 comes before that of the last")
    with kv_cache.running(views[1], True), early:
        layer.backward(1)
    with pytest.raises(KVCacheError, match=r"caches of \(layer, sequence\) \[\(0, 0\)\] were never freed"):
        kv_cache.assert_empty()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute_layers", [0, 1, 2])
@pytest.mark.parametrize("make", [runtime_plans.one_rank, runtime_plans.one_rank_split, runtime_plans.one_rank_two_stages])
def test_a_plan_runs_alike_with_all_or_some_of_its_stages_hosted_and_with_copies_beside(make, recompute_layers, reentrant):
    plan = make(recompute_layers=recompute_layers)
    _, found = same_gradients(plan, offloading_kv(plan), reentrant=reentrant)
    assert found[0].host_peak_bytes > 0
    same_gradients(plan, offloading_kv(plan, stages=[0]), reentrant=reentrant)
    same_gradients(plan, offloading_kv(offloading(plan, 0.7)), reentrant=reentrant)


@spread_by_default(3, case=CASES, kv_heads=(4, 2), when=(None, *HOSTS), mode=RECOMPUTE, fp32_gradients=("off", "on"))
def test_gradients_are_those_of_all_heads_at_once(monkeypatch, case, kv_heads, when, mode, fp32_gradients):
    together, apart = (layer_in_bf16(case, layers=2, kv_heads=kv_heads) for _ in range(2))
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
