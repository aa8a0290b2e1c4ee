"""Runs of replicas in lockstep: whole sequences in as many chunks of about equal time in all of them."""

import random
from itertools import accumulate, pairwise

import pytest

from megatron_epp.cost import CPU, ModelShape, analytic_costs
from megatron_epp.planner import UNLIMITED_BYTES, Problem
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.in_runs import LOCKSTEP_WIDTHS, cut_in_runs
from megatron_epp.planner.order import slice_groups

SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512)
COSTS = analytic_costs(SHAPE, CPU, [4, 4])


def chunkers_of(*batches, **more):
    caps = (UNLIMITED_BYTES,) * 2
    return [Chunker.of(Problem(tuple(lengths), (0, 1), caps, **more), COSTS, None) for lengths in batches]


def drawn(seed, replicas=4, multiple=1):
    """Log-normal lengths."""
    draw = random.Random(seed)

    def length():
        return multiple * max(1, int(draw.lognormvariate(5.5, 0.9)))

    return [[length() for _ in range(draw.randint(12, 40))] for _ in range(replicas)]


def times_us(chunker, table):
    return [sum(chunker.part_us(part.sequence, part.start, part.end) for part in chunk.segments) for chunk in table]


@pytest.mark.parametrize("widest", LOCKSTEP_WIDTHS)
@pytest.mark.parametrize("seed", range(6))
def test_all_replicas_have_runs_of_the_same_widths_with_whole_sequences_and_every_token_once(seed, widest):
    multiple = 1 + 3 * (seed % 2)
    chunkers = chunkers_of(*drawn(seed, multiple=multiple), token_multiple=multiple)
    aligned = cut_in_runs(chunkers, 12, widest)
    assert aligned is not None
    assert sum(aligned.runs) == len(aligned)
    assert len(aligned) >= 12
    for chunker, table in zip(chunkers, aligned.chunks, strict=True):
        assert len(table) == len(aligned)
        parts = sorted(part for chunk in table for part in chunk.segments)
        ends = {part.sequence: part.end for part in parts}
        assert ends == dict(enumerate(chunker.problem.lengths))
        assert all(a.end == b.start for a, b in pairwise(parts) if a.sequence == b.sequence)
        assert all(part.start % multiple == 0 for part in parts)
        assert all(part.start == 0 for chunk in table for part in chunk.segments[1:])
        begin = {group.start for group in slice_groups(table)}
        assert {0, *accumulate(aligned.runs[:-1])} <= begin


def test_chunks_of_the_same_number_take_about_equally_long_where_there_is_enough_to_fill_them():
    chunkers = chunkers_of(*([3000, 900, *[160] * 60, *[40] * 40],) * 2, [700] * 22, [250] * 70)
    aligned = cut_in_runs(chunkers, 12, 3)
    assert aligned is not None
    every = zip(*(times_us(chunker, table) for chunker, table in zip(chunkers, aligned.chunks, strict=True)), strict=True)
    assert sum(map(max, every)) <= 1.12 * max(chunker.total_us for chunker in chunkers)


def test_a_sequence_that_is_longer_than_the_widest_run_has_one_of_its_own_in_all_replicas():
    aligned = cut_in_runs(chunkers_of([6000, *[100] * 20], [300] * 40), 12, 2)
    assert aligned is not None
    assert aligned.runs[0] > 2
    first = aligned.chunks[0][: aligned.runs[0]]
    assert [chunk.segments[0].sequence for chunk in first] == [0] * aligned.runs[0]


@pytest.mark.parametrize("batches", [([500] * 20, [3]), ([500] * 20, [40, 2])])
def test_a_replica_with_too_little_to_cut_has_no_runs(batches):
    assert cut_in_runs(chunkers_of(*batches, token_multiple=1), 64, 1) is None
