"""Attention over slices equals attention over whole sequences; the relay holds what it must, no longer than it must."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import KVCacheError, SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import chunk_layouts
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.relay_chunks import CHANNELS, KV_HEADS, QUERY_HEADS, RECOMPUTE, ChunkedLayer, slices

CASES = {
    "split": ((23,), slices(0, 0, 9, 16, 22, 23), 1),
    "packed": ((5, 1, 8), [[(0, 0, 5), (1, 0, 1), (2, 0, 8)]], 1),
    "hybrid tail": ((13, 4, 1), [[(0, 0, 7)], [(0, 7, 13), (1, 0, 4), (2, 0, 1)]], 1),
    "hybrid middle": ((13, 4, 2), [[(0, 0, 5), (1, 0, 4)], [(0, 5, 9), (2, 0, 2)], [(0, 9, 13)]], 1),
    "padded": ((13, 4), [[(0, 0, 8)], [(0, 8, 13), (1, 0, 4)]], 4),
    "padded middle": ((13,), slices(0, 0, 5, 9, 13), 4),
    "two sliced sequences": ((9, 12), [[(0, 0, 5)], [(1, 0, 6)], [(1, 6, 12)], [(0, 5, 9)]], 1),
}


def assert_equals_whole_sequences(layer):
    for expected, actual in zip(layer.whole(), layer.chunked(), strict=True):
        for wanted, got in zip(expected[1:], actual, strict=True):
            assert relative_difference(got, wanted) < 1e-12
    if layer.expansion is not None:
        assert relative_difference(layer.expansion.grad, layer.expansion_gradient) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_outputs_of_chunks_are_rows_of_the_whole_sequences_outputs(case):
    layer = ChunkedLayer(*CASES[case])
    expected = [whole[0] for whole in layer.whole()]
    for c, chunk in enumerate(layer.plan.chunks):
        rows = torch.cat([expected[s.sequence][s.start : s.end] for s in chunk.segments])
        assert relative_difference(layer.forward(c)[: len(rows)], rows) < 1e-12


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
def backward_orders(draw, chunks):
    """Any order in which the slices of a sequence go last to first."""
    order = draw(st.permutations(range(len(chunks))))
    sequences = [chunk[0][0] for chunk in chunks]
    later_first = {q: [c for c in reversed(range(len(chunks))) if sequences[c] == q] for q in sequences}
    return [later_first[sequences[c]].pop(0) for c in order]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_segmentation_gives_the_gradients_of_whole_sequences(data):
    lengths, chunks, multiple = data.draw(segmentations())
    layer = ChunkedLayer(lengths, chunks, multiple, layers=2)
    for c in range(len(chunks)):
        layer.forward(c, data.draw(st.sampled_from(sorted(RECOMPUTE))))
    assert layer.kv_cache.num_bytes == layer.cache_bytes()
    for c in data.draw(backward_orders(chunks)):
        layer.backward(c)
    assert_equals_whole_sequences(layer)
    assert layer.kv_cache.num_bytes == 0


def test_without_backward_the_last_slice_frees_the_cache():
    layer = ChunkedLayer((9,), slices(0, 0, 4, 7, 9), layers=2, forward_only=True)
    seen = []
    with torch.no_grad():
        for c in range(3):
            layer.forward(c)
            seen.append(layer.kv_cache.num_bytes)
    assert seen == [layer.cache_bytes(), layer.cache_bytes(), 0]
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


def test_forward_of_a_slice_whose_prefix_never_ran_is_refused():
    layer = ChunkedLayer((9,), slices(0, 0, 4, 7, 9))
    with pytest.raises(KVCacheError, match="layer 0, sequence 0: forward of the slice at token 4 finds the keys of 0 tokens"):
        layer.forward(1)
    layer.forward(0)
    with pytest.raises(KVCacheError, match="slice at token 7 finds the keys of 4 tokens"):
        layer.forward(2)


def test_two_layers_with_one_number_are_told_and_a_recomputed_forward_is_not():
    layer = ChunkedLayer((9,), slices(0, 0, 4, 9))
    context = layer.contexts[0]
    assert context.view is not None
    keys, values = torch.zeros(4, KV_HEADS, CHANNELS), torch.zeros(4, KV_HEADS, CHANNELS)
    with context.kv_cache.running(context.view, False):
        context.kv_cache.append(0, context.view, (keys, values))
        context.kv_cache.append(1, context.view, (keys, values))
        with pytest.raises(KVCacheError, match="layer 0, sequence 0: attention runs twice in the forward"):
            context.kv_cache.append(0, context.view, (keys, values))
    with context.kv_cache.running(context.view, True):
        context.kv_cache.append(0, context.view, (keys, values))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0,), "backward at token 0 comes before that of the last"),
        ((1,), "backward at token 4 comes before that of the last"),
        ((2, 0), "backward of tokens 0 to 4 is out of order; slices have run backward down to token 7"),
    ],
)
def test_backward_of_a_slice_before_a_later_one_is_refused(order, message):
    layer = ChunkedLayer((9,), slices(0, 0, 4, 7, 9))
    for c in range(3):
        layer.forward(c)
    for c in order[:-1]:
        layer.backward(c)
    with pytest.raises(KVCacheError, match=message):
        layer.backward(order[-1])


def test_backward_of_a_slice_twice_is_refused():
    kv_cache = SlicedKVCache()
    first, last = (SliceView(3, a, b, 5, 5) for a, b in ((0, 2), (2, 5)))
    for view in (first, last):
        kv_cache.append(7, view, [torch.zeros(view.num_cached, 1, 2) for _ in "kv"])

    def backward(view):
        keys, _ = kv_cache.fetch(7, view, (torch.zeros(0, 1, 2),) * 2)
        kv_cache.take_gradient(7, view, (torch.zeros_like(keys), torch.zeros_like(keys)))

    backward(last)
    with pytest.raises(KVCacheError, match="layer 7, sequence 3: backward of tokens 2 to 5 is out of order"):
        backward(last)
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


def test_layouts_give_the_buffer_of_a_sliced_sequence_room_for_all_of_its_last_chunk():
    plan = ChunkedLayer((13, 4, 3), [[(0, 0, 8)], [(0, 8, 13), (1, 0, 4)], [(2, 0, 3)]], 4).plan
    first, tail, whole = (layout.view for layout in chunk_layouts(plan))
    assert (first.start, first.end, first.capacity, first.is_last_slice) == (0, 8, 8 + 12, False)
    assert (tail.start, tail.end, tail.capacity, tail.is_last_slice) == (8, 13, 8 + 12, True)
    assert (first.num_cached, tail.num_cached) == (8, 12)
    assert whole is None


def test_layouts_give_the_buffer_room_for_all_that_shares_an_earlier_slices_chunk():
    plan = ChunkedLayer((9, 12, 1), [[(0, 0, 5), (1, 0, 12)], [(0, 5, 9), (2, 0, 1)]]).plan
    first, tail = (layout.view for layout in chunk_layouts(plan))
    assert (first.capacity, first.num_cached) == (17, 5)
    assert (tail.capacity, tail.num_cached) == (10, 5)


def test_what_shares_an_earlier_slices_chunk_is_put_behind_it_in_the_buffer():
    kv_cache, view = SlicedKVCache(), SliceView(0, 3, 5, 9, 10)
    first = SliceView(0, 0, 3, 9, 10)
    kv_cache.append(0, first, [torch.zeros(3, 1, 2) for _ in "kv"])
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


def errors_in_bf16(num_slices, choice):
    """Return relative errors of a sequence's gradients of keys and values in bf16: the norm of the difference to dense
    attention in fp64 of the same numbers, over the norm of that.
    """
    length = 4 * num_slices
    sliced, whole = ChunkedLayer((length,), slices(0, *range(0, length + 1, 4))), ChunkedLayer((length,), [[(0, 0, length)]])
    sliced.kv_cache.fp32_gradients = choice
    sliced.sequences = [[x.detach().bfloat16().requires_grad_() for x in qkv] for qkv in sliced.sequences]
    sliced.weights = [x.bfloat16() for x in sliced.weights]
    whole.sequences = [[x.detach().double().requires_grad_() for x in qkv] for qkv in sliced.sequences]
    whole.weights = [x.double() for x in sliced.weights]
    for c in range(num_slices):
        sliced.forward(c)
    for c in reversed(range(num_slices)):
        sliced.backward(c)
    (_, _, *exact), (_, *found) = whole.whole()[0], sliced.chunked()[0]
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)]


def test_sums_of_128_slices_in_fp32_halve_the_error_of_sums_in_bf16():
    """In fp32 what is left is the rounding of what attention was given and gives: as much as with few slices."""
    rounded, by_itself = errors_in_bf16(128, "off"), errors_in_bf16(128, "auto")
    print(f"\nkeys and values, 128 slices: {rounded} in bf16, {by_itself} in fp32; 4 slices: {errors_in_bf16(4, 'auto')}")
    assert min(rounded) > 0.007
    assert max(by_itself) < 0.004
    assert by_itself == errors_in_bf16(128, "on")
    assert errors_in_bf16(4, "auto") == errors_in_bf16(4, "off")
    assert max(errors_in_bf16(4, "auto")) < 0.005


def test_every_layout_knows_how_many_slices_its_sequence_has():
    chunks = [*slices(0, *range(0, 21, 2)), [(1, 0, 3)], [(1, 3, 5), (2, 0, 4)], [(3, 0, 6)]]
    views = [layout.view for layout in chunk_layouts(ChunkedLayer((20, 5, 4, 6), chunks).plan)]
    assert [view and view.num_slices for view in views] == [10] * 10 + [2, 2, None]
