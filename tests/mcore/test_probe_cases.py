"""Batches that are timed on a stage, so that its lines hold for those that will come."""

import pytest

from megatron_epp.cost import causal_pairs
from megatron_epp.mcore.costs.probe import Case, cases_of


@pytest.mark.parametrize("context", [1024, 4096, 8192])
def test_cases_are_whole_packed_and_slices_all_along_the_context(context):
    cases = cases_of(context)
    assert {case.segments for case in cases if not case.prefix} == {1, 8}
    ends = {case.prefix + case.tokens for case in cases if case.prefix}
    assert max(ends) > 0.75 * context
    assert min(ends) < 0.5 * context
    assert all(case.prefix + case.tokens // case.segments <= context for case in cases)


def test_a_context_beyond_the_longest_measured_changes_nothing():
    assert cases_of(1 << 20, longest=4096) == cases_of(4096, longest=4096)


@pytest.mark.parametrize(
    ("multiple", "factor", "most_tokens"), [(64, 1, 1 << 30), (64, 2, 1 << 30), (128, 2, 700), (64, 1, 10)]
)
def test_tokens_are_multiples_that_ranks_can_share_and_fit_the_device(multiple, factor, most_tokens):
    cases = cases_of(4096, multiple, factor, most_tokens)
    assert all(number % multiple == 0 for case in cases for number in (case.tokens, case.prefix))
    assert max(case.tokens for case in cases) <= max(multiple, most_tokens)
    assert len(set(cases)) == len(cases)


def test_a_slices_chunk_pairs_and_view_are_of_one_sequence():
    case = Case(512, prefix=1024)
    ((sequence, start, end),) = case.chunk(7).segments
    view = case.view(7)
    assert (sequence, start, end) == (7, 1024, 1536) == (view.sequence, view.start, view.end)
    assert view.is_tail
    assert case.pairs == causal_pairs(1024, 1536)


def test_packed_segments_are_sequences_of_their_own():
    case = Case(512, segments=8)
    assert [(s.sequence, s.start, s.end) for s in case.chunk(3).segments] == [(3 + i, 0, 64) for i in range(8)]
    assert case.view(3) is None
    assert case.pairs == 8 * causal_pairs(0, 64)
