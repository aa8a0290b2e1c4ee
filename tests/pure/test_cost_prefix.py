"""Plans count once what attention's backward makes of a slice's prefix before it is added to the sums, as runs bound it."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_epp.cost import H100, analytic_profile, on_device, work_of
from megatron_epp.cost.blocks import LAYER, StageCosts
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.plan import Chunk, Segment, sizing
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.sizing import MOST_TRANSIENT_BYTES, heads_at_once, transient_kv_gradient_bytes
from megatron_epp.planner.memory.kv_offload_choice import without_caches

MILLION, SLICE = 1 << 20, 1 << 16
SLICES = [Chunk((Segment(0, start, start + SLICE),)) for start in range(0, MILLION, SLICE)]
WORK = work_of(SLICES, [MILLION])
BARE = analytic_profile(shape_of(load_flags("llama3-8b")), H100).costs([4] * 8)
LLAMA = on_device(BARE, 0.0)
KEY = 2 * 8 * 128 * 2
"""Bytes of a key and a value, all heads."""


def with_kv(**changes: float | None) -> StageCosts:
    return LLAMA.stages[0].changed(LAYER, kv=replace(LLAMA.stages[0].kv, **changes))


def test_a_million_tokens_of_an_8b_model_make_five_gibibytes_at_a_time_and_not_forty(monkeypatch):
    bounded = LLAMA.stages[0].layers.prefix_bytes(WORK)
    assert bounded[0] == 0
    one_head = 10 * KEY // 8 * MILLION  # as it is, for each of four query heads in fp32, and its keys and values copied
    assert bounded.max() == bounded[-1] == one_head - MOST_TRANSIENT_BYTES, (
        "what the chunk's own tokens take counts with its gradients"
    )
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 1 << 40)
    unbounded = LLAMA.stages[0].layers.prefix_bytes(WORK)
    own = 9 * KEY * SLICE
    assert unbounded[-2] == 9 * KEY * (MILLION - SLICE) - own
    assert unbounded[-1] == 9 * KEY * MILLION - own, "of so many slices sums are in fp32, and so memory of their own"
    narrow = with_kv(many_gradient_bytes_per_token=None).layers.prefix_bytes(WORK)
    assert narrow[-1] == 8 * KEY * MILLION - own, "what the last slice makes becomes the sums"
    assert (narrow[:-1] == unbounded[:-1]).all()


def test_whole_sequences_and_first_slices_have_no_prefix():
    chunks = [Chunk((Segment(0, 0, SLICE), Segment(1, 0, 100))), Chunk((Segment(2, 0, 4 * SLICE),))]
    work = work_of([*chunks, Chunk((Segment(0, SLICE, 2 * SLICE),))], [2 * SLICE, 100, 4 * SLICE])
    assert LLAMA.stages[0].layers.prefix_bytes(work)[:2].tolist() == [0, 0]


def test_a_layer_holds_it_beside_the_sums_of_the_last_slice():
    stage = with_kv(gradient_bytes_per_token=2.0 * KEY).changed(LAYER, attended_bytes_per_token=None)
    costs = replace(LLAMA, stages=(stage,))
    found, bare = (
        c.layer_peak_bytes(0, WORK)
        for c in (costs, replace(costs, stages=(stage.changed(LAYER, working_bytes_per_token=0.0),)))
    )
    np.testing.assert_array_equal(found.num_bytes - bare.num_bytes, found.prefix)
    np.testing.assert_array_equal(found.prefix, np.ceil(stage.layers.prefix_bytes(WORK)))
    assert found.prefix[-1] == found.prefix.max()
    np.testing.assert_array_equal(found.gradient, bare.gradient)


def test_caches_at_the_host_are_met_by_pieces_that_make_no_more():
    kv_offload = without_caches(WORK)
    assert kv_offload.kv_offload.all()
    assert not WORK.kv_offload.any()
    resident, streamed = (with_kv(gradient_bytes_per_token=2.0 * KEY).layers.prefix_bytes(w) for w in (WORK, kv_offload))
    assert (streamed <= resident).all()
    assert streamed[-1] == resident[-1], "one head at a time either way"


def test_a_piece_of_a_short_prefix_makes_its_own_heads_part():
    tokens, step = 24 * 1024, 8 * 1024
    short = work_of([Chunk((Segment(0, start, start + step),)) for start in range(0, tokens, step)], [tokens])
    resident, streamed = (LLAMA.stages[0].layers.prefix_bytes(work) for work in (short, without_caches(short)))
    assert resident[1] == 9 * KEY * step, "all heads of what is ahead of the second slice"
    piece = 9 * KEY * 2 * step // head_parts(8)
    assert streamed[1] == max(0, piece - 9 * KEY * step) < resident[1]


@pytest.mark.parametrize("sharing", [1, 2, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_plans_count_what_runs_make_and_never_less_behind_a_longer_prefix(kv_heads, sharing):
    head, times = 512, 1 + (2 * sharing if sharing > 1 else 0)
    keys = np.array([1, 1000, *(1 << at for at in range(14, 24))], dtype=np.int64)
    counted = transient_kv_gradient_bytes(keys, kv_heads, head, sharing)
    assert (np.diff(counted) >= 0).all()
    for number, planned in zip(keys.tolist(), counted.tolist(), strict=True):
        count = heads_at_once(kv_heads, number * head, sharing)
        copied = count < kv_heads  # by kernels that see no strides
        assert count * number * head * (times + copied) <= planned
        assert planned <= max(MOST_TRANSIENT_BYTES, number * head * (times + copied))
