"""Chunking: slices of equal time, short sequences packed, limits kept."""

import random

import pytest

from megatron_epp.contrib.papers.packing import PackedItem, pack
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.work import causal_pairs
from megatron_epp.plan import Chunk
from megatron_epp.planner import Options, plan
from tests.support.plan.planner_cases import pipeline, problem, web_lengths

WHALE = (131072, 90000, 40000, *web_lengths(60, seed=1, longest=4000))


def chunker(lengths: tuple[int, ...], *, multiple: int = 1, chunk_tokens: int | None = None) -> Slicer:
    return Slicer.of(problem(lengths, 4, token_multiple=multiple), pipeline(4), chunk_tokens)


def slices_of(chunks: tuple[Chunk, ...], sequence: int) -> list[tuple[int, int]]:
    return [(s.start, s.end) for chunk in chunks for s in chunk.segments if s.sequence == sequence]


def time_us(cut: Slicer, chunk: Chunk) -> float:
    return sum(cut.slice_us(s.start, s.end) for s in chunk.segments)


@pytest.mark.parametrize("slices", [2, 5, 16, 64])
def test_the_longest_sequence_is_cut_into_slices_of_equal_time_that_get_shorter(slices: int):
    cut = chunker(WHALE)
    parts = slices_of(cut.table(cut.grain(slices=slices)), 0)
    times = [cut.slice_us(start, end) for start, end in parts]
    lengths = [end - start for start, end in parts]
    assert len(parts) == slices
    assert max(times) < min(times) * 1.002
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.3 * lengths[-1]


def test_every_long_sequence_is_cut_where_the_longest_is():
    cut = chunker(WHALE)
    chunks = cut.table(cut.grain(slices=16))
    ends = [end for _, end in slices_of(chunks, 0)]
    for sequence in (1, 2):
        own = [end for _, end in slices_of(chunks, sequence)]
        assert (own[:-1], own[-1]) == ([end for end in ends if end < WHALE[sequence]], WHALE[sequence])


def test_a_last_slice_that_rounding_made_too_long_is_cut_again():
    cut = chunker((81,), multiple=10, chunk_tokens=30)
    assert slices_of(cut.table(cut.grain(chunks=1)), 0) == [(0, 30), (30, 50), (50, 80), (80, 81)]


@pytest.mark.parametrize(("tokens", "cap"), [(1 << 20, 8192), (1 << 18, 1000), (1 << 17, 1024), (30_000, 4096)])
@pytest.mark.parametrize("stages", [2, 4])
def test_under_a_cap_plans_are_no_slower_than_slices_of_one_size(tokens: int, cap: int, stages: int):
    asked, costs = problem((tokens,), stages), pipeline(stages, 2)
    made, fixed = (plan(asked, costs, Options(planner=name, chunk_tokens=cap)) for name in ("greedy", "seq1f1b"))
    assert max(map(made.padded_tokens, range(len(made.chunks)))) <= cap
    assert len(made.chunks) <= len(fixed.chunks) + 128 * stages
    is_faster = (tokens, stages) == (1 << 20, 4)
    assert made.predicted.makespan_us <= (0.995 if is_faster else 1.0) * fixed.predicted.makespan_us


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("multiple", "cap"), [(1, None), (128, 8192), (8, 1000), (1, 50)])
def test_every_token_is_in_one_chunk_and_every_chunk_under_its_cap(seed: int, multiple: int, cap: int | None):
    lengths = web_lengths(40, seed, longest=20000)
    cut = chunker(lengths, multiple=multiple, chunk_tokens=cap)
    for chunks in (cut.table(cut.grain(chunks=3 + 5 * seed)), cut.table(cut.grain(slices=1 + seed))):
        found = sorted(segment for chunk in chunks for segment in chunk.segments)
        assert all(s.start == 0 and s.end == lengths[s.sequence] for chunk in chunks for s in chunk.segments[1:])
        assert all(s.end % multiple == 0 or s.end == lengths[s.sequence] for s in found)
        for sequence, length in enumerate(lengths):
            parts = [(s.start, s.end) for s in found if s.sequence == sequence]
            assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][1] == length
        assert max(chunk.padded_tokens(multiple) for chunk in chunks) <= (cap or sum(lengths))


def test_tail_slices_take_short_sequences_along():
    cut = chunker(WHALE)
    tails = [chunk for chunk in cut.table(cut.grain(slices=16)) if chunk.kind(WHALE) == "hybrid"]
    assert {chunk.segments[0].sequence for chunk in tails} == {1, 2}
    assert all(chunk.segments[0].end == WHALE[chunk.segments[0].sequence] for chunk in tails)


def test_sequences_with_most_slices_come_first_and_batched_chunks_last():
    cut = chunker((5000, 60000, 200, 300, 131072, 100))
    chunks = cut.table(cut.grain(slices=16))
    lengths = cut.problem.lengths
    whole = [chunk.slice_of(lengths) is None for chunk in chunks]
    assert whole == sorted(whole)
    assert list(dict.fromkeys(chunk.segments[0].sequence for chunk in chunks if chunk.slice_of(lengths)))[:2] == [4, 1]


@pytest.mark.parametrize("seed", range(8))
def test_chunks_of_web_text_are_of_about_the_same_time(seed: int):
    cut = chunker(web_lengths(400, seed, longest=8192))
    times = sorted(time_us(cut, chunk) for chunk in cut.table(cut.grain(chunks=48)))
    mean = sum(times) / len(times)
    assert times[-1] < 1.35 * mean
    assert sum(abs(time - mean) for time in times) < 0.15 * sum(times)


def items(count: int, seed: int) -> list[PackedItem]:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 1000) for _ in range(count)]
    return [PackedItem(tokens + causal_pairs(0, tokens) / 500, tokens, (q,)) for q, tokens in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(30))
def test_packing_loses_nothing_and_keeps_the_token_limit(seed: int):
    tails = [PackedItem(900.0 + q, 300 + q, (1000 + q,)) for q in range(seed % 4)]
    shorts = items(50, seed)
    buckets = pack(tails, shorts, time_limit_us=500.0 + 100 * seed, token_limit=1000 + 50 * seed)
    assert sorted(q for bucket in buckets for q in bucket.sequences) == list(range(50))
    beside = [bucket.tokens - sum(shorts[q].tokens for q in bucket.sequences) for bucket in buckets]
    assert beside == [tail.tokens for tail in tails] + [0] * (len(buckets) - len(tails))
    assert all(bucket.tokens <= 1000 + 50 * seed for bucket in buckets)
    assert all(bucket.sequences for bucket in buckets[len(tails) :])
