"""Sizes of buffers: few, none too small, none much too large."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan.sizing import SIZES_PER_OCTAVE, size_class, size_classes

COUNTS = st.integers(0, 1 << 30)


@given(COUNTS)
def test_a_buffer_holds_what_it_is_for_and_at_most_an_eighth_more(count):
    assert count <= size_class(count) <= count * (1 + 1 / SIZES_PER_OCTAVE)


@given(COUNTS, COUNTS)
def test_more_tokens_never_get_a_smaller_buffer(one, other):
    assert size_class(min(one, other)) <= size_class(max(one, other))


@given(COUNTS)
def test_a_size_that_there_is_stays_as_it_is(count):
    assert size_class(size_class(count)) == size_class(count)


def test_sizes_are_few():
    counts = np.arange(1024, 1 << 20)
    assert len(set(size_classes(counts).tolist())) == 10 * SIZES_PER_OCTAVE + 1


@given(st.lists(COUNTS, min_size=1))
def test_many_at_a_time_are_as_one_by_one(counts):
    assert size_classes(np.array(counts)).tolist() == [size_class(count) for count in counts]
