"""Spans, inside of which no plan cuts; sequences with one loss, which stay together; and runs of whole ones in lockstep."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost.work import span_work, work_of
from megatron_epp.plan import Chunk, InfeasibleError, Plan, PlanError, Segment
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import OWN
from megatron_epp.plan.problem import TokenSpan
from megatron_epp.plan.spans import parted
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Options, Problem, plan, slice_groups
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.chunks.in_runs import LOCKSTEP_SHAPES, SHAPES, SMALL_ENDS, Shape, cut_in_runs, falling_times
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.order import arranged, joint_losses
from megatron_epp.planner.service.replica_balance import divide
from megatron_epp.planner.tables import tabulate
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.layouts.rank_work import LayerWork
from tests.support.calls import refusal
from tests.support.plan.campaign_cases import spans_of
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths

SPANNED = (20000, 9000, 6000, 3000, 1500, 700, 700, 300)


def with_spans(lengths=SPANNED, seed=3, work=1.0, most_tokens=900):
    draw = random.Random(seed)
    return tuple(spans_of(draw, length, work, most_tokens) for length in lengths)


def test_without_spans_the_same_batch_is_cut_inside_of_them():
    made = plan(problem(SPANNED, 4), pipeline(4), Options(slices=7))
    assert "is cut at token" in parted(made.chunks, made.lengths, with_spans())


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([1, 4]))
def test_every_grain_covers_every_token_outside_of_spans(seed, slices, multiple):
    random_ = random.Random(seed)
    lengths = tuple(random_.randrange(1, 400) for _ in range(random_.randrange(1, 6)))
    spans = with_spans(lengths, seed, work=random_.choice((0.0, 0.1, 30.0)), most_tokens=60)
    cut = Chunker.of(replace(problem(lengths, 2, token_multiple=multiple), spans=spans), pipeline(2), None)
    for shape in SHAPES:
        (table,) = cut_in_runs([cut], [falling_times(cut)], float(slices), shape).chunks
        assert parted(table, lengths, spans) == ""
        for q, length in enumerate(lengths):
            parts = sorted((s.start, s.end) for chunk in table for s in chunk.segments if s.sequence == q)
            assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), length]
            assert all(end % multiple == 0 for _, end in parts[:-1])


def test_a_sequence_with_much_work_in_its_spans_has_more_slices_than_a_longer_text():
    spans = ((), tuple(TokenSpan(at, at + 100, 40000.0) for at in range(0, 2000, 100)))
    cut = Chunker.of(replace(problem((4000, 2000), 1), spans=spans), pipeline(1), None)
    aligned = cut_in_runs([cut], [falling_times(cut)], 10.0, SHAPES[0])
    numbers = [sum(s.sequence == q for chunk in aligned.chunks[0] for s in chunk.segments) for q in (0, 1)]
    assert numbers[1] >= 7
    assert numbers[0] < 3


def test_a_spans_work_takes_time_and_memory_on_the_first_stage_alone():
    costs, asked = pipeline(3), replace(problem(SPANNED, 3), spans=with_spans(work=2.0))
    made = plan(asked, costs, Options(slices=5))
    bare, full = (tabulate(made.chunks, of_batch, costs) for of_batch in (replace(asked, spans=()), asked))
    work = [sum(span_work(asked.spans[q], *ends) for q, *ends in chunk.segments) for chunk in made.chunks]
    assert max(work) > 0
    line = costs.stages[0].layers.forward
    for name, us in (("forward_us", line.per_token_us), ("backward_us", costs.stages[0].layers.backward.per_token_us)):
        before, after = ([getattr(passes, name).tolist() for passes in tables.passes] for tables in (bare, full))
        assert after[0] == pytest.approx([time + us * own for time, own in zip(before[0], work, strict=True)])
        assert after[1:] == before[1:]
    kept_bytes = [costs.stages[0].layers.bytes_per_token * own / 2 for own in work]
    assert full.passes[0].activation == pytest.approx(bare.passes[0].activation + kept_bytes, abs=2)
    assert all((own.activation == other.activation).all() for own, other in zip(full.passes[1:], bare.passes[1:], strict=True))
    assert lower_bound_us(full) > lower_bound_us(bare)
    assert made.predicted.lower_bound_us <= made.predicted.makespan_us
    assert work_of(made.chunks, SPANNED).span_work is None


def test_replicas_share_the_work_of_spans():
    lengths, costs = (1000,) * 4, pipeline(2)
    heavy = (TokenSpan(0, 500, 1e6),)
    asked = replace(problem(lengths, 2), spans=(heavy, (), heavy, ()))
    division = divide(asked, costs, ((0,), (1,)), lambda problems: plan(problems[0], costs).predicted.makespan_us)
    assert all(len({0, 2} & {*share}) == 1 for share in division.shares)


def test_a_search_of_layouts_gives_a_first_stage_with_spans_fewer_layers():
    profile, placement = analytic_profile(shape_of(load_flags("llama3-8b")), H100), Placement("looped", 4, 1)

    def layers(spans):
        asked = replace(problem(SPANNED, 4), spans=spans)
        costs_of = lambda layout: profile.costs(layout.layers)  # noqa: E731
        return LayerWork.of([asked], costs_of).spread(16, placement).layers

    assert layers(with_spans(work=4.0))[0] < layers(())[0]


def test_what_forces_a_cut_is_refused_with_numbers():
    spans = ((TokenSpan(0, 10), TokenSpan(10, 800), TokenSpan(801, 900)), ())
    asked = replace(problem((1000, 100), 2, token_multiple=4), spans=spans)
    said = refusal(plan, asked, pipeline(2), Options(chunk_tokens=512), error=InfeasibleError)
    assert "tokens 8 to 800 of sequence 0 cannot be cut" not in said
    assert "tokens 0 to 800 of sequence 0 cannot be cut at a multiple of 4 outside of its 2 spans there" in said
    assert plan(asked, pipeline(2), Options(chunk_tokens=800)).chunks


def test_a_planner_that_does_not_know_spans_is_refused_where_it_cuts_one():
    asked = replace(problem(SPANNED, 4), spans=with_spans())
    with pytest.raises(PlanError, match=r"by planner 'seq1f1b' sequence 0 is cut at token .*, inside its span of tokens"):
        plan(asked, pipeline(4), Options(planner="seq1f1b", slices=7))
    assert plan(asked, pipeline(4), Options(planner="1f1b")).chunks


PAIRS = tuple(number // 2 for number in range(40))


def chunks_of(made: Plan, loss_groups: tuple[int, ...], number: int) -> set[int]:
    return {c for c, chunk in enumerate(made.chunks) for s in chunk.segments if loss_groups[s.sequence] == number}


def test_short_groups_share_chunks_and_long_ones_stay_together():
    lengths = (60000, 40000, 20000, 500, *[300] * 36)
    made = plan(replace(problem(lengths, 4, 70 * GIB), loss_groups=PAIRS), pipeline(4), Options())
    assert [number for number in range(20) if len(chunks_of(made, PAIRS, number)) > 1] == [0, 1]
    assert len(made.loss_groups) == 2
    runs = [run for run in slice_groups(made.chunks, PAIRS) if len(run) > 1]
    assert [range(group[0], group[-1] + 1) for group in made.loss_groups] == runs
    assert max(len(chunk.segments) for chunk in made.chunks) > 2


def test_groups_cost_little_where_they_fit_chunks():
    lengths = web_lengths(40, seed=4, longest=4000)
    free = plan(problem(lengths, 4), pipeline(4), Options())
    paired = plan(replace(problem(lengths, 4), loss_groups=PAIRS), pipeline(4), Options())
    assert paired.predicted.makespan_us < 1.05 * free.predicted.makespan_us


def test_one_group_for_each_sequence_changes_nothing_but_what_the_plan_says():
    asked = problem((60000, *web_lengths(20, seed=2)), 4, 40 * GIB)
    free = plan(asked, pipeline(4), Options())
    alone = plan(replace(asked, loss_groups=tuple(range(21))), pipeline(4), Options())
    assert replace(alone, loss_groups=()) == free
    assert alone.loss_groups[0] == tuple(c for c, chunk in enumerate(alone.chunks) if chunk.segments[0].sequence == 0)


def test_replicas_get_whole_groups():
    asked = replace(problem(web_lengths(40, seed=3), 2), loss_groups=tuple(reversed(PAIRS)))
    alone = tuple((replica,) for replica in range(3))
    costs = pipeline(2)
    division = divide(asked, costs, alone, lambda shares: max(about_us(share, costs, Options()) for share in shares))
    assert sorted(at for share in division.shares for at in share) == list(range(40))
    of = [{asked.loss_groups[at] for at in share} for share in division.shares]
    assert sum(map(len, of)) == len(set.union(*of)) == 20


def test_more_replicas_than_groups_and_fewer_groups_than_sequences_are_refused():
    asked = replace(problem((5, 6, 7, 8), 2), loss_groups=(0, 0, 0, 1))
    with pytest.raises(PlanError, match="2 groups of sequences cannot be shared by 3 replicas"):
        divide(asked, pipeline(2), ((0,), (1,), (2,)), lambda shares: 1.0)
    with pytest.raises(PlanError, match="loss groups of 1 sequences, and lengths of 2"):
        plan(replace(problem((5, 6), 2), loss_groups=(0,)), pipeline(2))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_arranged_tables_have_the_same_chunks_with_every_group_in_one_run(groups: list[int], draw: random.Random):
    sizes = [draw.randint(1, 3) for _ in groups]
    runs = [[Chunk((Segment(q, at, at + 1),)) for at in range(size)] for q, size in enumerate(sizes)]
    draw.shuffle(runs)
    table = tuple(chunk for run in runs for chunk in run)
    found = arranged(table, groups)
    assert sorted(map(repr, found)) == sorted(map(repr, table))
    for q, size in enumerate(sizes):
        assert [c.segments[0].start for c in found if c.segments[0].sequence == q] == list(range(size))
    for group in joint_losses(found, groups):
        assert group == tuple(range(group[0], group[-1] + 1))


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - set(OWN)))
def test_other_planners_refuse_losses_over_several_sequences(planner: str):
    asked = replace(problem((5, 6), 2), loss_groups=(3, 3))
    with pytest.raises(PlanError, match="orders each sequence by itself, and the batch has losses over several"):
        plan(asked, pipeline(2), Options(planner=planner))


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
    assert {part.sequence: part.end for part in parts} == dict(enumerate(problem.lengths))
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
        assert {0, *accumulate(aligned.runs[:-1])} <= {group.start for group in slice_groups(table)}


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
    chunks = cut([chunker], 3, Shape(4)).chunks[0]
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
    assert [chunk.segments[0].sequence for chunk in aligned.chunks[0][: aligned.runs[0]]] == [0] * aligned.runs[0]


@pytest.mark.parametrize("batches", [([500] * 20, [3]), ([500] * 20, [40, 2])])
def test_a_replica_with_too_little_to_cut_has_no_runs(batches):
    assert cut(chunkers_of(*batches, token_multiple=1), 64, Shape(1)) is None
