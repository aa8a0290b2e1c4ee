"""Runs: whole sequences, one behind the other, in chunks of about equal time, as many in all replicas in lockstep."""

import random
from itertools import accumulate, pairwise

import pytest

from megatron_epp.planner import UNLIMITED_BYTES, Problem
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.in_runs import LOCKSTEP_SHAPES, SHAPES, SMALL_ENDS, Shape, cut_in_runs, falling_times
from megatron_epp.planner.order import slice_groups
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs

SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512)
COSTS = analytic_costs(SHAPE, CPU, [4, 4])


def chunkers_of(*batches, **more):
    caps = (UNLIMITED_BYTES,) * 2
    return [Chunker.of(Problem(tuple(lengths), (0, 1), caps, **more), COSTS, None) for lengths in batches]


def drawn(seed, replicas=4, multiple=1):
    draw = random.Random(seed)

    def length():
        return multiple * max(1, int(draw.lognormvariate(5.5, 0.9)))

    return [[length() for _ in range(draw.randint(12, 40))] for _ in range(replicas)]


def times_us(chunker, table):
    return [sum(chunker.part_us(part.sequence, part.start, part.end) for part in chunk.segments) for chunk in table]


def cut(chunkers, num_chunks, shape):
    return cut_in_runs(chunkers, [*map(falling_times, chunkers)], num_chunks, shape)


def check_table(chunker, table):
    """Every token is there once; what a chunk goes on with comes first in it, and what goes on behind an end comes last."""
    problem = chunker.problem
    parts = sorted(part for chunk in table for part in chunk.segments)
    ends = {part.sequence: part.end for part in parts}
    assert ends == dict(enumerate(problem.lengths))
    assert all(a.end == b.start for a, b in pairwise(parts) if a.sequence == b.sequence)
    assert all(part.start % problem.token_multiple == 0 for part in parts)
    for chunk in table:
        assert all(part.start == 0 for part in chunk.segments[1:])
        begun = [at for at, part in enumerate(chunk.segments) if at and part.end < problem.lengths[part.sequence]]
        assert begun in ([], [len(chunk.segments) - 1])
        assert not begun or chunk.segments[0].start > 0


@pytest.mark.parametrize("shape", [*LOCKSTEP_SHAPES, Shape(4, SMALL_ENDS)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_all_replicas_have_runs_of_the_same_widths_with_whole_sequences_and_every_token_once(seed, shape):
    multiple = 1 + 3 * (seed % 2)
    chunkers = chunkers_of(*drawn(seed, multiple=multiple), token_multiple=multiple)
    aligned = cut(chunkers, 12, shape)
    assert sum(aligned.runs) == len(aligned)
    assert len(aligned) >= 12
    for chunker, table in zip(chunkers, aligned.chunks, strict=True):
        assert len(table) == len(aligned)
        check_table(chunker, table)
        begin = {group.start for group in slice_groups(table)}
        assert {0, *accumulate(aligned.runs[:-1])} <= begin


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_chunks", [1, 3, 12, 200])
def test_one_pipeline_is_cut_as_finely_as_its_sequences_allow(seed, shape, num_chunks):
    (chunker,) = chunkers_of(drawn(seed)[0])
    aligned = cut([chunker], num_chunks, shape)
    check_table(chunker, aligned.chunks[0])
    assert len(aligned) >= 0.9 * min(num_chunks, len(chunker.problem.lengths))


def test_streams_begin_a_sequence_in_the_chunk_where_another_one_ends():
    (chunker,) = chunkers_of([900] * 4)
    aligned = cut([chunker], 3, Shape(4))
    chunks = aligned.chunks[0]
    assert any(chunk.begun_of(chunker.problem.lengths) for chunk in chunks)
    assert [group.stop - group.start for group in slice_groups(chunks)] == [len(chunks)], "one run"


def test_slices_whose_keys_and_values_stream_have_at_most_twice_their_mean_tokens():
    (chunker,) = chunkers_of((1 << 20,))
    plain, streamed = (
        cut_in_runs([chunker], [falling_times(chunker)], 96, Shape(1), streams=streams).chunks[0] for streams in (False, True)
    )
    mean = -(-(1 << 20) // len(plain))
    most, longest_us = (
        [max(map(of, (chunk.segments[0] for chunk in chunks))) for chunks in (plain, streamed)]
        for of in (lambda part: part.num_tokens, lambda part: chunker.slice_us(part.start, part.end))
    )
    assert most[1] <= 2 * mean + 1 < most[0]
    assert longest_us[1] <= 1.15 * longest_us[0]


def test_chunks_at_both_ends_are_smaller_if_they_shall_be():
    (chunker,) = chunkers_of([200] * 400)
    even, small = (cut([chunker], 40, shape) for shape in (Shape(1), Shape(1, SMALL_ENDS)))
    assert max(times_us(chunker, even.chunks[0])) < 1.15 * min(times_us(chunker, even.chunks[0]))
    times = times_us(chunker, small.chunks[0])
    assert times[-1] < 0.5 * max(times)
    assert times[0] < max(times) < 1.1 * max(times_us(chunker, even.chunks[0]))
    assert times[-4:] == sorted(times[-4:], reverse=True)


def test_chunks_of_the_same_number_take_about_equally_long_where_there_is_enough_to_fill_them():
    chunkers = chunkers_of(*([3000, 900, *[160] * 60, *[40] * 40],) * 2, [700] * 22, [250] * 70)
    aligned = cut(chunkers, 12, Shape(3))
    every = zip(*(times_us(chunker, table) for chunker, table in zip(chunkers, aligned.chunks, strict=True)), strict=True)
    assert sum(map(max, every)) <= 1.06 * max(chunker.total_us for chunker in chunkers)


def test_a_sequence_that_is_longer_than_the_widest_run_has_one_of_its_own_in_all_replicas():
    aligned = cut(chunkers_of([6000, *[100] * 20], [300] * 40), 12, Shape(2))
    assert aligned.runs[0] > 2
    first = aligned.chunks[0][: aligned.runs[0]]
    assert [chunk.segments[0].sequence for chunk in first] == [0] * aligned.runs[0]


@pytest.mark.parametrize("batches", [([500] * 20, [3]), ([500] * 20, [40, 2])])
def test_a_replica_with_too_little_to_cut_has_no_runs(batches):
    assert cut(chunkers_of(*batches, token_multiple=1), 64, Shape(1)) is None
