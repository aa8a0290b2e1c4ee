"""Attention over slices equals attention over whole sequences; the relay holds what it must, no longer than it must."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import KVCacheError, SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import chunk_layouts
from tests.support.plan.small_plans import chunk
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.relay_chunks import ALL_BUT_ATTENTION, CHANNELS, KV_HEADS, QUERY_HEADS, ChunkedLayer, slices


def assert_equals_whole_sequences(layer):
    for expected, actual in zip(layer.whole(), layer.chunked(), strict=True):
        for wanted, got in zip(expected[1:], actual, strict=True):
            assert relative_difference(got, wanted) < 1e-12
    for weight, gradient in ((layer.expansion, layer.expansion_gradient), (layer.sinks, layer.sinks_gradient)):
        assert weight is None or relative_difference(weight.grad, gradient) < 1e-12


@st.composite
def segmentations(draw):
    """Lengths, chunks and a token multiple: sequences cut at random, short ones anywhere, slices of a sequence in order."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=5))
    sliced = [draw(st.booleans()) and n > 1 for n in lengths]
    queues = []
    for sequence, n in enumerate(lengths):
        if sliced[sequence]:
            inner = draw(st.sets(st.integers(1, n - 1), min_size=1, max_size=4))
            queues.append(slices(sequence, 0, *sorted(inner), n))
    chunks = []
    while queues := [queue for queue in queues if queue]:
        chunks.append(draw(st.sampled_from(queues)).pop(0))
    for sequence, n in enumerate(lengths):
        if not sliced[sequence]:
            place = draw(st.integers(0, len(chunks)))
            chunks[place : place + 1] = [[*(chunks[place] if place < len(chunks) else []), (sequence, 0, n)]]
    return lengths, chunks, draw(st.sampled_from([1, 2, 8]))


@st.composite
def streams(draw):
    """Lengths, chunks and a token multiple: sequences one after the other, cut anywhere, so that where one ends another may
    begin that goes on.
    """
    lengths = draw(st.lists(st.integers(1, 24), min_size=2, max_size=5))
    cuts = draw(st.sets(st.integers(1, sum(lengths) - 1), min_size=1, max_size=8))
    starts = [0, *itertools.accumulate(lengths)]
    chunks = []
    for low, high in itertools.pairwise([0, *sorted(cuts), sum(lengths)]):
        parts = [(q, max(low - at, 0), min(high - at, n)) for q, (at, n) in enumerate(zip(starts, lengths, strict=False))]
        inside = [part for part in parts if part[1] < part[2]]
        if inside[0][1] == 0 and inside[-1][2] < lengths[inside[-1][0]]:
            inside.insert(0, inside.pop())
        chunks.append(inside)
    return lengths, chunks, draw(st.sampled_from([1, 2, 8]))


@st.composite
def backward_orders(draw, chunks):
    order = draw(st.permutations(range(len(chunks))))
    roots = list(range(len(chunks)))
    for c, before in enumerate(slice_neighbours([chunk(*segments) for segments in chunks]).previous):
        roots[c] = roots[before[0]] if before else c
    later_first = {root: [c for c in reversed(range(len(chunks))) if roots[c] == root] for root in roots}
    return [later_first[roots[c]].pop(0) for c in order]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_segmentation_gives_the_outputs_and_gradients_of_whole_sequences(data):
    lengths, chunks, multiple = data.draw(st.one_of(segmentations(), streams()))
    window, has_sinks = data.draw(st.sampled_from([None, 1, 4, 11])), data.draw(st.booleans())
    layer = ChunkedLayer(lengths, chunks, multiple, layers=2, window=window, has_sinks=has_sinks)
    outputs = [whole[0] for whole in layer.whole()]
    # What slices of windows hand on is kept for Megatron's recompute, which is reentrant.
    modes = ["kept", "recomputed, reentrant", ALL_BUT_ATTENTION] + ["recomputed"] * (window is None)
    for c, segments in enumerate(chunks):
        out = layer.forward(c, data.draw(st.sampled_from(modes)))
        rows = torch.cat([outputs[sequence][start:end] for sequence, start, end in segments])
        assert relative_difference(out[: len(rows)], rows) < 1e-12
    assert window or layer.kv_cache.num_bytes == layer.cache_bytes()
    for c in data.draw(backward_orders(chunks)):
        layer.backward(c)
    assert_equals_whole_sequences(layer)
    assert layer.kv_cache.num_bytes == 0


@pytest.mark.parametrize("window", [None, 3])
def test_without_backward_the_last_slice_frees_the_cache_and_a_slice_hands_on_no_more_rows_than_its_window(window):
    layer, seen = ChunkedLayer((9,), slices(0, 0, 4, 7, 9), layers=2, forward_only=True, window=window), []
    with torch.no_grad():
        for c in range(3):
            layer.forward(c)
            seen.append(layer.kv_cache.num_bytes)
    kept = layer.cache_bytes() if window is None else 2 * window * layer.layers * KV_HEADS * CHANNELS * 8
    assert seen == [kept, kept, 0]
    layer.kv_cache.assert_empty()


def test_a_slice_keeps_its_queries_output_and_log_sum_exp_and_nothing_of_the_projection_they_came_from():
    context = ChunkedLayer((9, 3), [[(0, 0, 4), (1, 0, 3)], [(0, 4, 9)]]).contexts[0]
    projection = torch.zeros(7, QUERY_HEADS + 2 * KV_HEADS, CHANNELS, requires_grad=True) * 1.0
    q, k, v = projection.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
    with SavedTensors() as meter:
        out = chunk_attention(q, (k, v), context, 0, 0.5)
    rows = 2 * QUERY_HEADS * CHANNELS + QUERY_HEADS  # queries, output, log-sum-exp
    beside = 2 * KV_HEADS * CHANNELS  # keys and values of the three tokens that share the chunk
    assert meter.live_bytes == 4 * (7 * rows + 3 * beside)
    assert out.shape == (7, QUERY_HEADS, CHANNELS)


def test_two_layers_with_one_number_are_told_and_a_recomputed_forward_is_not():
    context = ChunkedLayer((9,), slices(0, 0, 4, 9)).contexts[0]
    assert context.view is not None
    both, kv_cache = (torch.zeros(4, KV_HEADS, CHANNELS),) * 2, context.kv_cache
    with kv_cache.running(context.view, False):
        for layer in (0, 1):
            kv_cache.append(layer, context.view, both)
        with pytest.raises(KVCacheError, match="layer 0, sequence 0: attention runs twice in the forward"):
            kv_cache.append(0, context.view, both)
    with kv_cache.running(context.view, True):
        kv_cache.append(0, context.view, both)


def test_backward_of_a_slice_before_a_later_one_or_twice_is_refused():
    kv_cache = SlicedKVCache()
    first, second, last = (SliceView(3, a, b, 5, 5) for a, b in ((0, 2), (2, 3), (3, 5)))
    for view in (first, second, last):
        kv_cache.append(7, view, [torch.zeros(view.num_cached, 1, 2) for _ in "kv"])

    def backward(view):
        keys, _ = kv_cache.fetch(7, view, (torch.zeros(0, 1, 2),) * 2)
        kv_cache.take_gradient(7, view, (torch.zeros_like(keys), torch.zeros_like(keys)))

    for early in (first, second):
        with pytest.raises(KVCacheError, match=f"backward at token {early.start} comes before that of the last"):
            backward(early)
    backward(last)
    for view in (first, last):
        out_of_order = f"layer 7, sequence 3: backward of tokens {view.start} to {view.end} is out of order; .* down to token 3"
        with pytest.raises(KVCacheError, match=out_of_order):
            backward(view)
    backward(second)
    backward(first)
    with pytest.raises(KVCacheError, match="backward of the slice at token 0 finds no cache"):
        backward(first)


def test_a_cache_left_over_is_an_error_that_names_layer_and_sequence():
    layer = ChunkedLayer((9, 3), [[(1, 0, 3)], *slices(0, 0, 4, 9)], layers=2)
    layer.forward(0)
    layer.kv_cache.assert_empty()
    layer.forward(1)
    with pytest.raises(KVCacheError, match=r"\[\(0, 0\), \(1, 0\)\] were never freed"):
        layer.kv_cache.assert_empty()


@pytest.mark.parametrize(("company", "room"), [(4, 12), (16, 16)], ids=["the last", "an earlier one"])
def test_the_buffer_of_a_sliced_sequence_has_room_for_all_that_shares_a_slices_chunk(company, room):
    chunks = [[(0, 0, 8), (3, 0, company)], [(0, 8, 13), (1, 0, 4)], [(2, 0, 3)]]
    first, tail, whole = (layout.view for layout in chunk_layouts(ChunkedLayer((13, 4, 3, company), chunks, 4).plan))
    assert (first.start, first.end, first.num_cached, first.capacity) == (0, 8, 8, 8 + room)
    assert (tail.start, tail.end, tail.num_cached, tail.capacity) == (8, 13, 12, 8 + 12)
    assert [(view.num_slices, view.is_last_slice) for view in (first, tail)] == [(2, False), (2, True)]
    assert whole is None


def test_what_shares_an_earlier_slices_chunk_is_put_behind_it_in_the_buffer():
    kv_cache, view = SlicedKVCache(), SliceView(0, 3, 5, 9, 10)
    kv_cache.append(0, SliceView(0, 0, 3, 9, 10), [torch.zeros(3, 1, 2) for _ in "kv"])
    chunk = torch.arange(14.0).reshape(7, 1, 2)  # two tokens of the slice, five next to it
    k, _ = kv_cache.append(0, view, (chunk, chunk))
    assert torch.equal(k[3:], chunk)
    tail = SliceView(0, 5, 9, 9, 10)
    whole, _ = kv_cache.append(0, tail, [torch.ones(5, 1, 2) for _ in "kv"])
    assert k.data_ptr() == whole.data_ptr()
    kv_cache.take_gradient(0, tail, [torch.zeros(10, 1, 2) for _ in "kv"])
    again, _ = kv_cache.fetch(0, view, (chunk[2:], chunk[2:]))
    assert torch.equal(again[3:], chunk)


PRECISIONS = [("auto", 8, False), ("auto", 9, True), ("on", 2, True), ("off", 9, False)]


@pytest.mark.parametrize(("choice", "num_slices", "in_fp32"), PRECISIONS)
def test_gradients_of_many_slices_add_up_in_fp32(choice, num_slices, in_fp32):
    """A thousand gradients of 2**-9 next to a one: bf16, which has eight bits, loses every one of them."""
    kv_cache, length = SlicedKVCache(fp32_gradients=choice), 1001
    views = [SliceView(0, i, i + 1, length, length, num_slices) for i in range(length)]
    for view in views:
        kv_cache.append(0, view, [torch.zeros(1, 1, 1, dtype=torch.bfloat16) for _ in "kv"])
    small = torch.full((length, 1, 1), 2.0**-9, dtype=torch.bfloat16)
    own = torch.ones(length, 1, 1, dtype=torch.bfloat16)
    for view in reversed(views):
        grad = own if view.is_last_slice else small[: view.stop]
        own_dk, _ = kv_cache.take_gradient(0, view, (grad.clone(), grad.clone()))
    assert own_dk.dtype == torch.bfloat16
    exact = 1 + (length - 1) * 2.0**-9
    assert own_dk.item() == (torch.tensor(exact).bfloat16().item() if in_fp32 else 1.0)
    assert kv_cache.num_bytes == 0
