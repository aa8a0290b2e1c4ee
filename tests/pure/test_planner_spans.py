"""Spans: plans cut none, count their work on the first stage, and refuse what would force a cut."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost import H100, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.cost.work import TokenSpan, span_work_of, work_of
from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.layouts.rank_work import WHOLE, LayerWork
from megatron_epp.planner.service.replica_balance import divide
from megatron_epp.planner.spans import parted
from megatron_epp.planner.tables import tabulate
from tests.support.plan.planner_cases import pipeline, problem

LENGTHS = (20000, 9000, 6000, 3000, 1500, 700, 700, 300)


def with_spans(lengths=LENGTHS, seed=3, work=1.0, most=900):
    """Return spans that leave little between them."""
    random_ = random.Random(seed)
    every = []
    for length in lengths:
        spans, at = [], random_.randrange(40)
        while (end := at + random_.randrange(1, most)) < length:
            spans.append(TokenSpan(at, end, work * (end - at), 0.5 * work * (end - at)))
            at = end + random_.choice((0, 1, 5, 200))
        every.append(tuple(spans))
    return tuple(every)


def test_without_spans_the_same_batch_is_cut_inside_of_them():
    made = plan(problem(LENGTHS, 4), pipeline(4), Options(slices=7))
    assert "is cut at token" in parted(made.chunks, made.lengths, with_spans())


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([1, 4]))
def test_every_grain_covers_every_token_outside_of_spans(seed, slices, multiple):
    random_ = random.Random(seed)
    lengths = tuple(random_.randrange(1, 400) for _ in range(random_.randrange(1, 6)))
    spans = with_spans(lengths, seed, work=random_.choice((0.0, 0.1, 30.0)), most=60)
    cut = Chunker.of(replace(problem(lengths, 2, token_multiple=multiple), spans=spans), pipeline(2), None)
    for table in (cut.table(cut.grain(slices=slices)), cut.table(cut.grain(chunks=float(slices)))):
        assert parted(table, lengths, spans) == ""
        for q, length in enumerate(lengths):
            parts = sorted((s.start, s.end) for chunk in table for s in chunk.segments if s.sequence == q)
            assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), length]
            assert all(end % multiple == 0 for _, end in parts[:-1])


def test_a_sequence_with_much_work_in_its_spans_has_more_slices_than_a_longer_text():
    spans = ((), tuple(TokenSpan(at, at + 100, 40000.0) for at in range(0, 2000, 100)))
    cut = Chunker.of(replace(problem((4000, 2000), 1), spans=spans), pipeline(1), None)
    table = cut.table(cut.grain(slices=10))
    numbers = [sum(s.sequence == q for chunk in table for s in chunk.segments) for q in (0, 1)]
    assert numbers[1] == 10
    assert numbers[0] < 3


def test_a_spans_work_takes_time_and_memory_on_the_first_stage_alone():
    costs, asked = pipeline(3), replace(problem(LENGTHS, 3), spans=with_spans(work=2.0))
    made = plan(asked, costs, Options(slices=5))
    bare, full = (tabulate(made.chunks, of_batch, costs) for of_batch in (replace(asked, spans=()), asked))
    work = [span_work_of(chunk, asked.spans) for chunk in made.chunks]
    assert max(work) > 0
    line = costs.stages[0].layers.forward
    for name, us in (("forward_us", line.per_token_us), ("backward_us", costs.stages[0].layers.backward.per_token_us)):
        before, after = getattr(bare, name), getattr(full, name)
        assert after[0] == pytest.approx([time + us * own for time, own in zip(before[0], work, strict=True)])
        assert after[1:] == before[1:]
    kept_bytes = [costs.stages[0].layers.bytes_per_token * own / 2 for own in work]
    assert full.activation[0] == pytest.approx(
        [held + own for held, own in zip(bare.activation[0], kept_bytes, strict=True)], abs=2
    )
    assert [*map(list, full.activation[1:])] == [*map(list, bare.activation[1:])]
    assert lower_bound_us(full) > lower_bound_us(bare)
    assert made.predicted.lower_bound_us <= made.predicted.makespan_us
    assert work_of(made.chunks, LENGTHS).span_work is None


def test_replicas_share_the_work_of_spans():
    lengths, costs = (1000,) * 4, pipeline(2)
    heavy = (TokenSpan(0, 500, 1e6),)
    asked = replace(problem(lengths, 2), spans=(heavy, (), heavy, ()))
    division = divide(asked, costs, ((0,), (1,)), lambda problems: plan(problems[0], costs).predicted.makespan_us)
    assert all(len({0, 2} & {*share}) == 1 for share in division.shares)


def test_a_search_of_layouts_gives_a_first_stage_with_spans_fewer_layers():
    profile, placement = analytic_profile(shape_of(load_flags("llama3-8b")), H100), Placement("looped", 4, 1)

    def layers(spans):
        asked = replace(problem(LENGTHS, 4), spans=spans)
        costs_of = lambda layout: profile.costs([count // 2 for count in layout.halves])  # noqa: E731
        return LayerWork.of([asked], costs_of, halves=False).spread(16, placement, WHOLE).halves

    assert layers(with_spans(work=4.0))[0] < layers(())[0]


def test_what_forces_a_cut_is_refused_with_numbers():
    spans = ((TokenSpan(0, 10), TokenSpan(10, 800), TokenSpan(801, 900)), ())
    asked = replace(problem((1000, 100), 2, token_multiple=4), spans=spans)
    with pytest.raises(InfeasibleError) as told:
        plan(asked, pipeline(2), Options(chunk_tokens=512))
    assert "tokens 8 to 800 of sequence 0 cannot be cut" not in str(told.value)
    assert "tokens 0 to 800 of sequence 0 cannot be cut at a multiple of 4 outside of its 2 spans there" in str(told.value)
    assert plan(asked, pipeline(2), Options(chunk_tokens=800)).chunks


def test_a_planner_that_does_not_know_spans_is_refused_where_it_cuts_one():
    asked = replace(problem(LENGTHS, 4), spans=with_spans())
    with pytest.raises(PlanError, match=r"by planner 'seq1f1b' sequence 0 is cut at token .*, inside its span of tokens"):
        plan(asked, pipeline(4), Options(planner="seq1f1b", slices=7))
    assert plan(asked, pipeline(4), Options(planner="1f1b")).chunks
