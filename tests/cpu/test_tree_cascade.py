"""Rows that several segments of a chunk read are read at once, with the results of rows gathered for each of them."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.features.cascade import common_rows, tree_cascade
from megatron_epp.features.cascade.tree_cascade import CascadeView, cascaded
from megatron_epp.features.cascade.tree_layouts import tree_layouts
from megatron_epp.features.trees.readers import reads_of
from megatron_epp.features.trees.tree_cache import TreeCache
from megatron_epp.plan import sizing
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.plan.proof import check
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION
from megatron_epp.runtime.autograd.handles import CachedAttentionOutput
from megatron_epp.runtime.context import ChunkContext
from tests.cpu.test_runtime_trees import assert_equals_each_alone
from tests.support.plan.random_forests import Forest, forest, forest_plan
from tests.support.plan.small_plans import chunk
from tests.support.runtime.dense_attention import relative_difference

QUERY_HEADS, KV_HEADS, CHANNELS = 4, 2, 3
SCALE = CHANNELS**-0.5


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 0)
    monkeypatch.setattr(common_rows, "ROWS_PER_TOKEN", 0)


def levels_of(layouts):
    return [len(layout.view.table.levels) for layout in layouts if isinstance(layout.view, CascadeView)]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([1, 4]), st.booleans())
def test_any_forest_in_few_chunks_gives_the_loss_and_the_gradients_of_its_sequences(seed, multiple, forward_only):
    rng = random.Random(seed)
    grown = forest(rng, trees=2, depth=4)
    plan = forest_plan(rng, grown, multiple, forward_only, joins=0.9)
    assert check(plan) == []
    assert max(levels_of(tree_layouts(plan)), default=0) > 0
    assert_equals_each_alone(plan, grown, rng)


def siblings(rng, lent):
    """Responses that borrow so many tokens each of the first text, in one chunk but for the tokens that are lent."""
    first = [rng.randrange(29) for _ in range(max(lent) + 6)]
    texts = [first, *([*first[:tokens], (first[tokens] + 1) % 29, rng.randrange(29), 3] for tokens in lent)]
    return Forest(texts, (NOTHING_BORROWED, *(Borrowed(0, tokens - 1) for tokens in lent)))


@pytest.mark.parametrize("lent", [(9,) * 7, (5, 9, 9, 7, 12, 5)], ids=["alike", "of several lengths"])
@pytest.mark.parametrize("joins", [0.5, 1.0])
def test_many_siblings_of_one_prompt_have_the_gradients_of_their_sequences(lent, joins):
    for seed in range(4):
        rng = random.Random(seed)
        grown = siblings(rng, lent)
        plan = forest_plan(rng, grown, joins=joins)
        assert joins < 1 or levels_of(tree_layouts(plan))[0] >= len({*lent}) - 1
        assert_equals_each_alone(plan, grown, rng)


def layouts_of(chunks, borrowed, multiple=1):
    plan = SimpleNamespace(
        chunks=chunks, borrowed=borrowed, loss_groups=(), padded_tokens=lambda c: chunks[c].padded_tokens(multiple)
    )
    return tree_layouts(plan)


NESTED = (NOTHING_BORROWED, Borrowed(0, 8), Borrowed(1, 11), Borrowed(1, 11), Borrowed(0, 8), NOTHING_BORROWED)
CHUNKS = (
    chunk((0, 0, 5)),
    chunk((0, 5, 8), (5, 0, 4)),
    chunk((0, 8, 10), (1, 8, 14), (2, 11, 13), (5, 4, 6), (3, 11, 15), (4, 8, 9)),
)
"""A prefix in two chunks that four read, three of which also read 3 tokens more, with another sequence among them."""


def test_rows_in_common_are_in_front_once_and_every_segment_reads_all_of_its_prefix():
    view = layouts_of(CHUNKS, NESTED)[2].view
    assert [
        (rows.level, rows.members, rows.start, rows.stop) for rows in common_rows.common_rows(CHUNKS[2].segments, reads())
    ] == [
        (0, (0, 1, 2, 4, 5), 0, 8),
        (1, (2, 4), 8, 11),
    ]
    assert view.num_keys == sum(segment.end for segment in CHUNKS[2].segments)
    assert view.joined.num_keys == view.num_keys - 4 * 8 - 3 == sum(call.key_starts[-1] for call in view.table.calls)
    assert view.table.levels[0].tokens == (slice(0, 10), slice(12, 17))
    assert [piece.num_readers for piece in view.joined.shared] == [5, 5, 2]  # of the two parts of 0, and of 1


def reads():
    return reads_of(CHUNKS, NESTED)


def test_a_call_more_is_made_where_enough_rows_are_gathered_less(monkeypatch):
    segments = CHUNKS[2].segments
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 32)
    assert [rows.saved for rows in common_rows.common_rows(segments, reads())] == [32]
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 33)
    assert common_rows.common_rows(segments, reads()) == ()
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 0)
    monkeypatch.setattr(common_rows, "ROWS_PER_TOKEN", 32 / 15)
    assert [rows.saved for rows in common_rows.common_rows(segments, reads())] == [32]  # 3 rows for 6 tokens are too few
    assert not levels_of(layouts_of(CHUNKS[:2], NESTED))


def run(dtype, sinks, offered):
    """Outputs of a layer on the chunks, and the gradients of its inputs and of sinks; and the kinds of rows' sums."""
    generator, sums = torch.Generator().manual_seed(1), set()
    cache, layouts = TreeCache("on" if dtype is torch.bfloat16 else "auto"), layouts_of(CHUNKS, NESTED, 4)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = torch.randn(QUERY_HEADS, generator=generator).requires_grad_() if sinks else None
    outs, inputs = [], []
    for c, layout in enumerate(layouts):
        own = [random(layout.table.num_tokens, heads, CHANNELS).requires_grad_() for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
        context = ChunkContext(
            c, layout.table, cache, layout.view, attention_output=CachedAttentionOutput() if offered else None
        )
        if offered:
            with torch.no_grad():
                chunk_attention(own[0], own[1:], context, 0, SCALE, sinks=weights)
        outs.append(chunk_attention(own[0], own[1:], context, 0, SCALE, sinks=weights))
        inputs += own
    for out in reversed(outs):
        out.backward(random(*out.shape))
        sums |= {x.dtype for rows in cache._nodes.values() for x in rows.gradients}
    cache.assert_empty()
    return [*outs, *(x.grad for x in inputs), *([weights.grad] if sinks else [])], sums


@pytest.mark.parametrize("heads_at_once", [1, KV_HEADS])
@pytest.mark.parametrize("offered", [False, True], ids=["", "recomputed without attention"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float64, 1e-12), (torch.bfloat16, 0.02)], ids=["fp64", "bf16"])
def test_results_are_those_of_rows_gathered_for_every_segment(monkeypatch, dtype, least, sinks, offered, heads_at_once):
    calls = []
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 1 if heads_at_once == 1 else 1 << 30)
    real = EXACT_ATTENTION.backward
    counted = replace(EXACT_ATTENTION, backward=lambda *inputs: calls.append(inputs[2].shape[:2]) or real(*inputs))
    monkeypatch.setattr(tree_cascade, "cascaded", lambda kernel: cascaded(counted))
    found, sums = run(dtype, sinks, offered)
    assert {heads for _, heads in calls} == {heads_at_once}
    assert [calls.count((rows, heads_at_once)) for rows in (8, 3)] == [KV_HEADS // heads_at_once] * 2
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 1000)
    wanted, _ = run(dtype, sinks, offered)
    for one, other in zip(found, wanted, strict=True):
        assert relative_difference(one, other) < least
    assert sums == {torch.float32 if dtype is torch.bfloat16 else dtype}


def test_rows_are_gathered_where_a_layer_has_a_window_or_a_kernel_fails_its_verification(monkeypatch):
    layout = layouts_of(CHUNKS, NESTED)[2]
    like = [torch.ones(1, heads, CHANNELS) for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)]
    windowed = layout.table.within(3)
    assert layout.view.call(EXACT_ATTENTION, windowed, like) == (layout.view, EXACT_ATTENTION, windowed)
    assert layout.view.call(EXACT_ATTENTION, layout.table, like)[0] is layout.view.joined
    wrong = replace(EXACT_ATTENTION, of_heads=lambda saved, own, tokens=slice(None): (2 * saved[0][own, tokens],))
    assert layout.view.call(wrong, layout.table, like) == (layout.view, wrong, layout.table)
