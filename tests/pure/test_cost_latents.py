"""Prefixes of slices: latents that stand for their keys and values, and the gradients that backwards make of them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.cost.blocks import LAYER, StageCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, causal_pairs, work_of
from megatron_epp.features.learnt_costs.timed import Timed, fitted_line
from megatron_epp.plan import Chunk, Segment, sizing
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.shape_classes import token_class
from megatron_epp.plan.sizing import MOST_TRANSIENT_BYTES, expanded_at_once, heads_at_once, transient_kv_gradient_bytes
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.in_runs import Shape, cut_in_runs, falling_times
from megatron_epp.planner.infeasible import InfeasibleError
from megatron_epp.planner.latents_choice import LatentsTrial, choose_latents
from megatron_epp.tools.formulas import H100, ModelShape, Profile, analytic_profile, on_device
from megatron_epp.tools.formulas.analytic import profile_for
from megatron_epp.tools.formulas.library import load_flags, shape_of

TOKENS = 1 << 18
LENGTHS = (TOKENS, 9000, 4000)
SLICES = tuple(Chunk((Segment(0, start, end),)) for start, end in pairwise(range(0, TOKENS + 1, TOKENS // 16)))


DEEPSEEK = load_flags("deepseek-v3") | {"num_layers": 16, "mtp_num_layers": None, "seq_length": TOKENS, "bf16": True}
"""DeepSeek-V3 without multi-token prediction, of four layers on a stage if there are four stages."""


def deepseek(**flags: object) -> ModelShape:
    return shape_of(DEEPSEEK | flags)


def profile(latents: bool, **flags: object) -> Profile:
    return analytic_profile(deepseek(epp_latents="on" if latents else "off", **flags), H100)


def costs(latents: bool, **flags: object) -> PipelineCosts:
    return on_device(profile(latents, **flags).costs([4] * 4, state_bytes_per_parameter=0))


def test_a_long_sequence_of_a_stage_holds_a_gibibyte_of_latents_where_it_held_eighty_of_keys_and_values() -> None:
    for latents, held_gib in ((True, 1.125), (False, 80.0)):
        of_stage, share = costs(latents).cache_bytes(1, work_of(SLICES, (TOKENS,))), costs(latents).fragmentation_share
        assert of_stage[0] / (1 + share) / 2**30 == pytest.approx(held_gib)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (8, 1), (1, 8), (4, 2)])
def test_every_rank_has_the_latents_of_all_tokens_and_makes_keys_and_values_of_its_own_heads(tensor: int, context: int) -> None:
    shape = deepseek(epp_latents="on", tensor_model_parallel_size=tensor, context_parallel_size=context)
    assert shape.kv_bytes_per_token == (512 + 64) * 2
    assert (shape.kv_heads_on_rank, shape.queries_per_key) == (1, 1)
    assert shape.expanded_heads == 128 // tensor // context
    assert shape.expanded_bytes_per_token == shape.expanded_heads * (192 + 128) * 2


def test_a_slice_takes_longer_by_what_it_reads_and_a_whole_sequence_does_not() -> None:
    by_kv, by_latents = (costs(latents) for latents in (False, True))
    whole = work_of((Chunk((Segment(0, 0, 4096),)),), (4096,))
    assert by_latents.forward_us(1, whole) == pytest.approx(by_kv.forward_us(1, whole), rel=0.03)  # it moves fewer bytes
    assert by_latents.backward_us(1, whole) == pytest.approx(by_kv.backward_us(1, whole), rel=0.03)
    times_us = [each.forward_us(1, work_of(SLICES, (TOKENS,))) for each in (by_latents, by_kv)]
    more_us = times_us[0] - times_us[1]
    read_us = by_latents.stages[1].line("forward").per_read_us
    assert np.diff(more_us) == pytest.approx(read_us * TOKENS / 16)
    # A product of 512 with 128 heads of 128 + 128 channels for each token, by four layers, at 600 TFLOP/s.
    assert read_us == pytest.approx(4 * (2 * 512 * 128 * 256 / 600e12 + 128 * 320 * 2 / 2.4e12) * 1e6)
    assert by_latents.stages[1].line("backward").per_read_us == pytest.approx(3 * read_us)


def test_recompute_that_keeps_attentions_output_reads_no_latents_again() -> None:
    layer = profile(True).layer
    assert layer.recompute["selective"].again.per_read_us == layer.recompute["mlp"].again.per_read_us == 0
    assert layer.recompute["selective"].again.per_token_us < profile(False).layer.recompute["selective"].again.per_token_us


@given(st.integers(1, 1 << 20), st.sampled_from([1, 4, 16, 24, 128]), st.sampled_from([320, 640]))
def test_no_group_of_heads_makes_more_than_is_planned(keys: int, heads: int, head_bytes: int) -> None:
    kv = KVBytes(bytes_per_token=1152, expanded_bytes_per_token=heads * head_bytes, expanded_heads=heads)
    work = replace(work_of((Chunk((Segment(0, keys - 1, keys),)),), (keys + 1,)), last=np.zeros(1, dtype=np.bool_))
    at_once = expanded_at_once(keys, heads, head_bytes)
    assert heads % at_once == 0
    assert kv.forward_bytes(work)[0] >= at_once * keys * head_bytes
    assert kv.prefix_bytes(work)[0] + kv.forward_bytes(work)[0] >= 2 * at_once * keys * head_bytes + 2 * 1152 * keys
    assert at_once == 1 or 2 * at_once * token_class(keys) * head_bytes <= 1 << 30


def test_a_read_counts_as_so_many_pairs_where_times_are_learnt() -> None:
    earlier = LinearTime(5.0, 2.0, 0.01, per_read_us=3.0)
    sizes = [(tokens, causal_pairs(start, start + tokens), start) for start in (0, 500, 900) for tokens in (100, 150, 400)]
    times = [Timed(tokens, pairs, 2 * earlier.time_us(tokens, pairs, reads), reads=reads) for tokens, pairs, reads in sizes]
    assert fitted_line(earlier, times).per_read_us == pytest.approx(6.0)
    assert fitted_line(earlier, times).per_pair_us == pytest.approx(0.02)
    assert fitted_line(earlier, times[:2]).per_read_us == pytest.approx(6.0)  # scaled: too few sizes


def test_slices_of_latents_take_equal_times() -> None:
    problem = Problem(lengths=LENGTHS, placement=(0, 1, 2, 3), cap_bytes=(1 << 60,) * 4)
    chunker = Chunker.of(problem, costs(True), None)
    falling = [falling_times(chunker)]
    aligned = cut_in_runs([chunker], falling, 16 * chunker.total_us / falling[0][0][0], Shape(1))
    longest = LENGTHS.index(max(LENGTHS))
    slices = [part for chunk in aligned.chunks[0] for part in chunk.segments if part.sequence == longest]
    times_us = [chunker.slice_us(part.start, part.end) for part in slices]
    assert chunker.line.per_read_us > 0
    assert len(times_us) == 16
    assert max(times_us) < 1.1 * min(times_us)


def test_a_search_that_finds_nothing_for_keys_and_values_leaves_latents() -> None:
    problem = Problem(lengths=LENGTHS, placement=(0, 1, 2, 3), cap_bytes=(1 << 50,) * 4, token_multiple=8)

    def trial(choice: str) -> LatentsTrial:
        if choice == "off":
            raise InfeasibleError("no layout fits")
        return LatentsTrial([problem], costs(True, tensor_model_parallel_size=2), Options())

    assert choose_latents(trial).relays_latents


def test_a_measured_profile_keeps_its_times_and_gets_the_bytes_of_latents() -> None:
    shape, formula = deepseek(epp_latents="on"), profile(True)
    slow = profile(False)
    slow = replace(slow, layer=replace(slow.layer, forward=slow.layer.forward.scaled(3)))
    found = profile_for(slow, shape, H100)
    for name in ("bytes_per_token", "attended_bytes_per_token", "weight_bytes_per_token"):
        assert getattr(found.layer, name) == getattr(formula.layer, name) < getattr(slow.layer, name)
    assert found.layer.recompute["mlp"].bytes_per_token == formula.layer.recompute["mlp"].bytes_per_token
    assert found.layer.recompute["mlp"].again == slow.layer.recompute["mlp"].again
    assert (found.kv_bytes_per_token, found.expanded_heads) == (formula.kv_bytes_per_token, 128)
    assert found.layer.forward == replace(slow.layer.forward, per_read_us=formula.layer.forward.per_read_us)
    assert found.layer.backward.per_read_us == formula.layer.backward.per_read_us > 0
    assert profile_for(slow, deepseek(epp_latents="off"), H100) == slow


@pytest.mark.parametrize(("cap_gib", "relays_latents"), [(1 << 10, False), (200, False), (40, True), (1, True)])
def test_the_faster_plan_decides_and_latents_where_nothing_else_fits(cap_gib: int, relays_latents: bool) -> None:
    problem = Problem(lengths=LENGTHS, placement=(0, 1, 2, 3), cap_bytes=(cap_gib << 30,) * 4, token_multiple=8)
    flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    found = choose_latents(lambda choice: LatentsTrial([problem], costs(choice == "on", **flags), Options()))
    assert (found.relays_latents, "alone" in str(found)) == (relays_latents, cap_gib == 40)


MILLION, PART = 1 << 20, 1 << 16
PARTS = [Chunk((Segment(0, start, start + PART),)) for start in range(0, MILLION, PART)]
WORK = work_of(PARTS, [MILLION])
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
    assert bounded.max() == bounded[-1] == one_head - MOST_TRANSIENT_BYTES, "own tokens' bytes count with its gradients"
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 1 << 40)
    unbounded = LLAMA.stages[0].layers.prefix_bytes(WORK)
    own = 9 * KEY * PART
    assert unbounded[-2] == 9 * KEY * (MILLION - PART) - own
    assert unbounded[-1] == 9 * KEY * MILLION - own, "of so many slices sums are in fp32, and so memory of their own"
    narrow = with_kv(many_gradient_bytes_per_token=None).layers.prefix_bytes(WORK)
    assert narrow[-1] == 8 * KEY * MILLION - own, "what the last slice makes becomes the sums"
    assert (narrow[:-1] == unbounded[:-1]).all()


def test_whole_sequences_and_first_slices_have_no_prefix():
    chunks = [Chunk((Segment(0, 0, PART), Segment(1, 0, 100))), Chunk((Segment(2, 0, 4 * PART),))]
    work = work_of([*chunks, Chunk((Segment(0, PART, 2 * PART),))], [2 * PART, 100, 4 * PART])
    assert LLAMA.stages[0].layers.prefix_bytes(work)[:2].tolist() == [0, 0]


def test_a_layer_holds_it_beside_the_sums_of_the_last_slice():
    stage = with_kv(gradient_bytes_per_token=2.0 * KEY).changed(LAYER, attended_bytes_per_token=None)
    stages = stage, stage.changed(LAYER, working_bytes_per_token=0.0)
    found, bare = (replace(LLAMA, stages=(one,)).layer_peak_bytes(0, WORK) for one in stages)
    np.testing.assert_array_equal(found.num_bytes - bare.num_bytes, found.prefix)
    np.testing.assert_array_equal(found.prefix, np.ceil(stage.layers.prefix_bytes(WORK)))
    assert found.prefix[-1] == found.prefix.max()
    np.testing.assert_array_equal(found.gradient, bare.gradient)


def test_caches_at_the_host_are_met_by_pieces_that_make_no_more():
    kv_offload = replace(WORK, cache_tokens=0 * WORK.cache_tokens)
    assert kv_offload.kv_offload.all()
    assert not WORK.kv_offload.any()
    resident, streamed = (with_kv(gradient_bytes_per_token=2.0 * KEY).layers.prefix_bytes(w) for w in (WORK, kv_offload))
    assert (streamed <= resident).all()
    assert streamed[-1] == resident[-1], "one head at a time either way"


def test_a_piece_of_a_short_prefix_makes_its_own_heads_part():
    tokens, step = 24 * 1024, 8 * 1024
    short = work_of([Chunk((Segment(0, start, start + step),)) for start in range(0, tokens, step)], [tokens])
    resident, streamed = (
        LLAMA.stages[0].layers.prefix_bytes(work) for work in (short, replace(short, cache_tokens=0 * short.cache_tokens))
    )
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
