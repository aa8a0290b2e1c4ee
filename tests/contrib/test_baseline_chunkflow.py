"""ChunkFlow: the activations of the last K chunks of a sequence, whatever its length."""

from __future__ import annotations

import pytest

from megatron_epp.contrib.papers.chunkflow import recompute_all_but_last
from megatron_epp.plan import NO_RECOMPUTE, Op, Plan
from megatron_epp.planner import Options, plan
from megatron_epp.planner.baselines.contest import fixed_size_chunks
from tests.support.plan.planner_cases import GIB, pipeline, problem

COSTS = pipeline(1)
STAGE = COSTS.stages[0]


def retained(made: Plan, rank: int) -> int:
    """Most chunks alive at a time that keep all their activations."""
    alive = peak = 0
    for action in made.actions(rank):
        if made.recompute[action.stage][action.chunk] == NO_RECOMPUTE:
            alive += 1 if action.op is Op.F else -1
            peak = max(peak, alive)
    return peak


def test_long_sequences_are_cut_and_short_ones_stand_alone():
    lengths = (2500, 400, 5000, 500, 900)
    chunks = fixed_size_chunks(lengths, 1000, standalone=True)
    assert [chunk.kind(lengths) for chunk in chunks] == ["split"] * 8 + ["batched"] * 2
    assert [chunk.num_tokens for chunk in chunks] == [1000] * 5 + [1000, 1000, 500] + [900, 900]


@pytest.mark.parametrize("retain", [1, 2, 3, 4, 9])
def test_all_but_the_last_chunks_of_a_sequence_recompute_all_layers(retain: int):
    chunks = fixed_size_chunks((4000, 2000, 500), 1000, standalone=True)
    layers = recompute_all_but_last(chunks, (3, 5), retain)
    dropped = max(0, 4 - retain), max(0, 2 - retain)
    for row, most in zip(layers, (3, 5), strict=True):
        assert row == [*[most] * dropped[0], *[0] * (4 - dropped[0]), *[most] * dropped[1], *[0] * (2 - dropped[1]), 0]


@pytest.mark.parametrize("chunks", [4, 8, 16])
def test_activations_do_not_grow_with_the_sequence_but_caches_and_layer_inputs_do(chunks: int):
    """With K = 1: one chunk's activations, everyone's layer inputs, keys, values and their gradients."""
    size, length = 2048, 2048 * chunks
    kept = STAGE.num_layers * (STAGE.layers.bytes_per_token - STAGE.kv.bytes_per_token)
    inputs = STAGE.num_layers * STAGE.layers.input_bytes_per_token
    extra, cache = STAGE.ends_bytes_per_token, STAGE.num_layers * STAGE.kv.bytes_per_token
    least = STAGE.static_bytes + size * kept + (length - size) * inputs + length * (extra + 2 * cache)
    asked = problem((length,), 1, int(least) + chunks + 3)
    made = plan(asked, COSTS, Options(planner="chunkflow", chunk_tokens=size))
    assert retained(made, 0) == 1
    # The gradient of keys and values comes layer by layer, as the last chunk's activations go.
    assert least - length * cache <= made.predicted.peak_bytes[0] <= least + chunks + 3


def test_more_memory_retains_more():
    asked = [problem((65_536,), 1, cap * GIB) for cap in (16, 18, 22, 80)]
    kept = [retained(plan(p, COSTS, Options(planner="chunkflow", chunk_tokens=4096)), 0) for p in asked]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1] == 16


def test_without_a_cap_nothing_is_recomputed():
    made = plan(problem((65_536, 300, 9000), 4), pipeline(4), Options(planner="chunkflow"))
    assert not any(again.num_layers for row in made.recompute for again in row)
